"""Checks of combinations of settings, which the schema cannot express.

Every ValueError names the keys.
"""

from dataclasses import Field, fields
from typing import Any

from megatron.config.model_options import check_model_options
from megatron.config.parallelism import HYBRID, check_parallelism
from megatron.config.schema import (
    SYNTHETIC,
    CheckpointConfig,
    DatasetConfig,
    DistConfig,
    LrSchedulerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RunConfig,
)


def check_config(config: RunConfig) -> None:
    """Check combinations of keys. Raises ValueError with the keys."""
    _check_checkpoint(config.checkpoint)
    _check_model(config)
    _check_objective(config)
    # imported models have exactly one row per token; only masked text needs a row for [MASK]
    masks = config.objective.name != "autoregressive" or config.objective.masked_input_ratio > 0
    spare = 1 if masks and config.model.mask_id is None else 0
    if config.model.vocab_rows < config.model.n_tokens + spare:
        raise ValueError(
            f"model.vocab_rows: {config.model.vocab_rows} rows are too few for {config.model.n_tokens} tokens"
            f"{' and [MASK]' if spare else ''}. Remove the key."
        )
    data = config.dataset
    if data.mixture is not None and (data.path_train is not None or data.order != "epoch"):
        raise ValueError("dataset.mixture: replaces path_train and order. Remove those keys.")
    _check_length(config.lr_scheduler)
    # synthetic tokens do not repeat unless unique_tokens limits them
    endless = data.path_train == SYNTHETIC and data.unique_tokens is None
    if endless and config.lr_scheduler.total_epochs is not None:
        raise ValueError(
            "lr_scheduler.total_epochs: synthetic tokens have no epochs; set total_iterations, or "
            "dataset.unique_tokens to repeat them"
        )
    if config.dataset.unique_tokens is not None:
        _check_unique_tokens(config.dataset)
    window = config.logging.profile_steps
    if window is not None and (len(window) != 2 or not 1 <= window[0] <= window[1]):
        raise ValueError(f"logging.profile_steps: got {window}, expected [first, last], counted from 1")
    check_engine(config.dist, config.optim)
    check_parallelism(config)


def _check_unique_tokens(data: DatasetConfig) -> None:
    """Raise ValueError if the data has no fixed sequence of whole samples whose first can be selected."""
    if data.mixture is not None:
        raise ValueError(
            "dataset.unique_tokens: a mixture defines its own size. Remove one of the two settings."
        )
    if data.order == "megatron":
        raise ValueError(
            "dataset.unique_tokens: got dataset.order=megatron, expected epoch, because Megatron's order "
            "cuts samples again in every epoch. Use tools/subset_corpus.py instead."
        )


def _check_model(config: RunConfig) -> None:
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
    # an id outside the vocabulary never occurs, so the mask would have no effect
    if model.document_mask and not 0 <= (model.eod_id or 0) < model.n_tokens:
        raise ValueError(f"model.eod_id: got {model.eod_id}, expected 0 to {model.n_tokens - 1}")
    check_model_options(model, config.objective.name)
    if model.attention_window is not None and config.objective.orders > 1:
        raise ValueError(
            "model.attention_window: got objective.orders above 1, expected 1. Remove one of the two."
        )
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


def _check_objective(config: RunConfig) -> None:
    """Check combinations of the objective's options, and that none belongs to the other objective."""
    objective = config.objective
    if (objective.low_noise_start is None) != (objective.low_noise_iterations is None):
        raise ValueError(
            "objective: got one of low_noise_start and low_noise_iterations, expected both or neither"
        )
    if objective.masked_input_ratio == 0 and objective.masked_input_rate != ObjectiveConfig.masked_input_rate:
        raise ValueError(
            f"objective.masked_input_rate: got {objective.masked_input_rate} without masked inputs. Set "
            "masked_input_ratio, or remove the key."
        )
    if objective.orders > 1 and config.model.document_mask:
        raise ValueError(
            "objective.orders: got an order over the whole sample together with model.document_mask, which "
            "splits samples. Choose one of the two."
        )
    for key in list_changed_keys(objective):
        owner = key.metadata["objective"]
        if owner not in (None, objective.name):
            raise ValueError(
                f"objective.{key.name}: belongs to {owner}, but objective.name is {objective.name}"
            )


def list_changed_keys(section: Any) -> list[Field[Any]]:
    """Return the keys whose value is not the default.

    A key that is set to its default cannot be distinguished from an omitted one, and has no effect.
    """
    return [key for key in fields(section) if getattr(section, key.name) != key.default]


def _check_checkpoint(checkpoint: CheckpointConfig) -> None:
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


def _check_length(length: LrSchedulerConfig) -> None:
    """Check combinations of keys of `lr_scheduler`. Raises ValueError with the keys."""
    _require_exactly_one(length, "the length", "total_iterations", "total_tokens", "total_epochs")
    _require_at_most_one(length, "the warm-up", "warmup_iterations", "warmup_tokens", "warmup_fraction")
    decays = ("decay_iterations", "decay_tokens", "decay_fraction")
    _require_at_most_one(length, "the decay", *decays)
    decay_keys = (
        [key for key in decays if getattr(length, key) is not None] if length.kind == "constant" else []
    )
    if length.kind != "wsd" and length.decay_shape != LrSchedulerConfig.decay_shape:
        decay_keys.append("decay_shape")
    if decay_keys:
        raise ValueError(
            f"lr_scheduler.{decay_keys[0]}: kind {length.kind} has no separate decay; set kind: wsd"
        )


def _require_exactly_one(length: LrSchedulerConfig, what: str, *keys: str) -> None:
    """Raise ValueError unless exactly one of the keys is set."""
    _require_at_most_one(length, what, *keys)
    if all(getattr(length, key) is None for key in keys):
        raise ValueError(f"lr_scheduler: give {what} as {_join_keys(keys)}")


def _require_at_most_one(length: LrSchedulerConfig, what: str, *keys: str) -> None:
    """Raise ValueError if more than one of the keys is set."""
    if sum(getattr(length, key) is not None for key in keys) > 1:
        raise ValueError(f"lr_scheduler: give {what} as {_join_keys(keys)}, not as two of them")


def _join_keys(keys: tuple[str, ...]) -> str:
    return f"either {', '.join(keys[:-1])} or {keys[-1]}"


def check_engine(dist: DistConfig, optim: OptimConfig) -> None:
    """Raise ValueError with the settings that the engine of a run does not support."""
    if dist.engine != "torch" and dist.sharding_stage in HYBRID:
        raise ValueError(
            f"dist.sharding_stage: got {dist.sharding_stage}, expected zero0, zero1, zero2 or zero3 with "
            f"dist.engine={dist.engine}"
        )
    unsupported = {
        f"{name}.{key.name}={getattr(section, key.name)}": key.metadata["engine"]
        for name, section in (("dist", dist), ("optim", optim))
        for key in list_changed_keys(section)
        if key.metadata["engine"] not in (None, dist.engine)
    }
    if unsupported:
        # of two engines, all unsupported settings require the same other one
        (required,) = set(unsupported.values())
        hint = ""
        if required == "torch" and not all(key.startswith("optim.") for key in unsupported):
            hint = f" Set dist.engine=torch, which supports them with {dist.sharding_stage} as well."
        raise ValueError(
            f"{', '.join(unsupported)}: got dist.engine={dist.engine}, expected {required}.{hint}"
        )
    if dist.engine == "torch":
        return
    if dist.offload_optimizer and dist.sharding_stage == "zero0":
        raise ValueError(
            "dist.offload_optimizer: got dist.sharding_stage=zero0, expected zero1, zero2 or zero3"
        )
    if dist.offload_parameters and dist.sharding_stage != "zero3":
        raise ValueError(
            f"dist.offload_parameters: got dist.sharding_stage={dist.sharding_stage}, expected zero3"
        )
