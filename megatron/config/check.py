"""What keys may be, and what one says about another, where the schema cannot. Every ValueError names them."""

from dataclasses import fields

from megatron.config.schema import CheckpointConfig, ModelConfig, OptimConfig, RunConfig

OF_OBJECTIVE = {
    "autoregressive": ("orders", "order_kind", "order_noise", "randmask_ratio"),
    "masked_diffusion": ("t_draw", "low_noise_start", "low_noise_iterations", "ar_ratio"),
}


def check_model(config: RunConfig) -> None:
    """Shapes that cannot be built, and options that would have no effect."""
    model = config.model
    if model.positions == "rotary" and model.d_head % 2:
        raise ValueError(f"model.d_head: found {model.d_head}, rotary positions want an even width")
    if model.n_heads % model.kv_heads:
        raise ValueError(f"model.n_kv_heads: {model.kv_heads} does not divide the {model.n_heads} heads")
    # in another order than left to right the model may read the last token, which else is a target only
    wanted = config.dataset.seq_len + (config.objective.orders > 1)
    if model.positions == "learned" and (model.n_positions or 0) < wanted:
        raise ValueError(
            f"model.n_positions: {model.n_positions} learned positions are fewer than the {wanted} that "
            f"dataset.seq_len {config.dataset.seq_len} and objective.orders {config.objective.orders} want"
        )
    if not 0 <= model.attention_dropout < 1:
        raise ValueError(
            f"model.attention_dropout: found {model.attention_dropout}, wanted 0 or more and less than 1"
        )
    if model.document_mask and not 0 <= (model.eod_id or 0) < model.n_tokens:
        raise ValueError(f"model.eod_id: found {model.eod_id}, wanted one of the {model.n_tokens} tokens")
    _check_parametrization(model)


def _check_parametrization(model: ModelConfig) -> None:
    """A parametrization names the base that its sizes share: left to itself each would be its own."""
    wanted = {"mup": ("base_d_model",), "completep": ("base_d_model", "base_n_layers")}
    for key in wanted.get(model.parametrization, ()):
        if getattr(model, key) is None:
            raise ValueError(
                f"model.{key}: missing; parametrization '{model.parametrization}' carries settings over from "
                "a base shape, the same for every size of a study"
            )
    for key in ("base_d_model", "base_n_layers", "base_d_head"):
        scaled = ("completep",) if key == "base_n_layers" else ("mup", "completep")
        if getattr(model, key) is not None and model.parametrization not in scaled:
            raise ValueError(
                f"model.{key}: has no effect under parametrization '{model.parametrization}'; "
                f"leave it out or set {' or '.join(scaled)}"
            )


def check_objective(config: RunConfig) -> None:
    """Options of the other objective, and shares that are none."""
    objective = config.objective
    if not 0 < objective.rate_min < 1:
        raise ValueError(f"objective.rate_min: found {objective.rate_min}, wanted between 0 and 1")
    for key in ("ar_ratio", "randmask_ratio"):
        if not 0 <= getattr(objective, key) <= 1:
            raise ValueError(f"objective.{key}: found {getattr(objective, key)}, wanted 0 to 1")
    if (objective.low_noise_start is None) != (objective.low_noise_iterations is None):
        raise ValueError("objective: give low_noise_start and low_noise_iterations together")
    if objective.low_noise_start is not None and objective.low_noise_start > 1:
        raise ValueError(f"objective.low_noise_start: found {objective.low_noise_start}, wanted 1 or less")
    if objective.orders > 1 and config.model.document_mask:
        raise ValueError(
            "objective.orders: an order runs over the whole sample, model.document_mask cuts it; choose one"
        )
    default = {f.name: f.default for f in fields(objective)}
    for name, keys in OF_OBJECTIVE.items():
        for key in keys:
            if name != objective.name and getattr(objective, key) != default[key]:
                raise ValueError(f"objective.{key}: belongs to {name}, objective.name is {objective.name}")


def check_optim(optim: OptimConfig) -> None:
    """Numbers that AdamW would refuse in its own words, or take for something else."""
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(optim, key) < 1:
            raise ValueError(f"optim.{key}: found {getattr(optim, key)}, wanted 0 or more and less than 1")
    for key in ("weight_decay", "grad_clip"):
        if not getattr(optim, key) >= 0:
            raise ValueError(f"optim.{key}: found {getattr(optim, key)}, wanted 0 or more")


def check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Checkpoints that nobody would find again, or that would never be made."""
    if checkpoint.asynchronous and checkpoint.state_dict_type != "sharded":
        raise ValueError("checkpoint.asynchronous: wants checkpoint.state_dict_type=sharded, found full")
    if not checkpoint.prefix or "/" in checkpoint.prefix:
        raise ValueError(
            f"checkpoint.prefix: found {checkpoint.prefix!r}, wanted the first part of a name; folders are "
            "for checkpoint.directory"
        )
    early = [step for step in checkpoint.chkpt_at or () if step < 1]
    if early:
        raise ValueError(f"checkpoint.chkpt_at: found {early[0]}, steps are counted from 1")
