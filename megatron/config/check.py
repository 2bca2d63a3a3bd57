"""Checks of settings that the schema cannot express: ranges, and combinations of keys.

Every ValueError names the keys.
"""

from dataclasses import fields

from megatron.config.schema import CheckpointConfig, ModelConfig, OptimConfig, RunConfig

OBJECTIVE_KEYS = {
    "autoregressive": ("orders", "order_kind", "order_noise", "randmask_ratio"),
    "masked_diffusion": ("t_draw", "low_noise_start", "low_noise_iterations", "ar_ratio"),
}


def check_model(config: RunConfig) -> None:
    """Check that the shape can be built and that every option has an effect."""
    model = config.model
    if model.positions == "rotary" and model.d_head % 2:
        raise ValueError(f"model.d_head: got {model.d_head}, expected an even width for rotary positions")
    if model.n_heads % model.kv_heads:
        raise ValueError(
            f"model.n_kv_heads: got {model.kv_heads}, expected a divisor of model.n_heads {model.n_heads}"
        )
    # in an order other than left to right the model may also read the last token, otherwise only a target
    n_positions = config.dataset.seq_len + (config.objective.orders > 1)
    if model.positions == "learned" and (model.n_positions or 0) < n_positions:
        raise ValueError(
            f"model.n_positions: got {model.n_positions} learned positions, expected {n_positions} or more "
            f"for dataset.seq_len {config.dataset.seq_len} and objective.orders {config.objective.orders}"
        )
    if not 0 <= model.attention_dropout < 1:
        raise ValueError(
            f"model.attention_dropout: got {model.attention_dropout}, expected 0 or more and less than 1"
        )
    # an id outside the vocabulary never occurs, so the mask would have no effect
    if model.document_mask and not 0 <= (model.eod_id or 0) < model.n_tokens:
        raise ValueError(f"model.eod_id: got {model.eod_id}, expected 0 to {model.n_tokens - 1}")
    _check_parametrization(model)


def _check_parametrization(model: ModelConfig) -> None:
    """Check that the base shape is given exactly if the parametrization uses it.

    The base has no default: each size would be its own base, and settings would not transfer.
    """
    required = {"mup": ("base_d_model",), "completep": ("base_d_model", "base_n_layers")}
    for key in required.get(model.parametrization, ()):
        if getattr(model, key) is None:
            raise ValueError(
                f"model.{key}: missing, expected for parametrization '{model.parametrization}'. Set it to "
                "that of the base shape, which is the same for every size of a study."
            )
    for key in ("base_d_model", "base_n_layers", "base_d_head"):
        scaled = ("completep",) if key == "base_n_layers" else ("mup", "completep")
        if getattr(model, key) is not None and model.parametrization not in scaled:
            raise ValueError(
                f"model.{key}: has no effect under parametrization '{model.parametrization}'. "
                f"Remove it or set model.parametrization={' or '.join(scaled)}."
            )


def check_objective(config: RunConfig) -> None:
    """Check the ranges of the objective's options and that none belongs to the other objective."""
    objective = config.objective
    if not 0 < objective.rate_min < 1:
        raise ValueError(f"objective.rate_min: got {objective.rate_min}, expected a number between 0 and 1")
    for key in ("ar_ratio", "randmask_ratio"):
        if not 0 <= getattr(objective, key) <= 1:
            raise ValueError(f"objective.{key}: got {getattr(objective, key)}, expected 0 to 1")
    if (objective.low_noise_start is None) != (objective.low_noise_iterations is None):
        raise ValueError(
            "objective: got one of low_noise_start and low_noise_iterations, expected both or neither"
        )
    if objective.low_noise_start is not None and objective.low_noise_start > 1:
        raise ValueError(f"objective.low_noise_start: got {objective.low_noise_start}, expected 1 or less")
    if objective.orders > 1 and config.model.document_mask:
        raise ValueError(
            "objective.orders: got an order over the whole sample together with model.document_mask, which "
            "splits samples. Choose one of the two."
        )
    # a key set to its default cannot be distinguished from an omitted one, and has no effect
    default = {f.name: f.default for f in fields(objective)}
    for name, keys in OBJECTIVE_KEYS.items():
        for key in keys:
            if name != objective.name and getattr(objective, key) != default[key]:
                raise ValueError(
                    f"objective.{key}: belongs to {name}, but objective.name is {objective.name}"
                )


def check_optim(optim: OptimConfig) -> None:
    """Check the ranges of AdamW's settings."""
    for key in ("beta1", "beta2"):
        if not 0 <= getattr(optim, key) < 1:
            raise ValueError(f"optim.{key}: got {getattr(optim, key)}, expected 0 or more and less than 1")
    for key in ("weight_decay", "grad_clip"):
        if not getattr(optim, key) >= 0:  # also true for NaN
            raise ValueError(f"optim.{key}: got {getattr(optim, key)}, expected 0 or more")


def check_checkpoint(checkpoint: CheckpointConfig) -> None:
    """Check that checkpoints can be written and found again."""
    if checkpoint.asynchronous and checkpoint.state_dict_type != "sharded":
        raise ValueError("checkpoint.asynchronous: got checkpoint.state_dict_type=full, expected sharded")
    if not checkpoint.prefix or "/" in checkpoint.prefix:
        raise ValueError(
            f"checkpoint.prefix: got {checkpoint.prefix!r}, expected the first part of a file name. Set "
            "folders with checkpoint.directory."
        )
    early = [step for step in checkpoint.chkpt_at or () if step < 1]
    if early:
        raise ValueError(
            f"checkpoint.chkpt_at: got {early[0]}, expected 1 or more (steps are counted from 1)"
        )
