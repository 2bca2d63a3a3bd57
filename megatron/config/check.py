"""Checks of combinations of settings, which types and bounds cannot express.

A key states in `option(needs=...)` which settings it needs. The
functions below find other contradictions.
"""

import re
from collections.abc import Iterator
from dataclasses import Field, fields
from itertools import chain
from typing import Any

from megatron.config.parallelism import HYBRID
from megatron.config.schema import SYNTHETIC, DistConfig, LrSchedulerConfig, RunConfig


def check_config(config: RunConfig) -> None:
    """Check combinations of keys. Raises ValueError with the keys."""
    errors = chain(
        find_unmet_needs(config), _find_model_errors(config), _find_length_errors(config.lr_scheduler),
        _find_run_errors(config), _find_engine_errors(config.dist), _find_parallel_errors(config),
    )  # fmt: skip
    for error in errors:
        raise ValueError(error)


def list_changed_keys(section: Any) -> list[Field[Any]]:
    """Return the keys whose value is not the default.

    A key that is set to its default cannot be distinguished from an
    omitted one, and has no effect.
    """
    return [key for key in fields(section) if getattr(section, key.name) != key.default]


def find_unmet_needs(config: RunConfig) -> Iterator[str]:
    """Yield a message for each key that has no effect, or another one, without another setting."""
    sections = {section.name: getattr(config, section.name) for section in fields(config)}
    del sections["name"]  # the only key outside of the sections
    for section, keys in sections.items():
        for key in list_changed_keys(keys):
            for need in key.metadata["needs"].split():
                other, sign, expected = re.split("([=>])", need)
                other_section, other_key = other.split(".")
                value = getattr(sections[other_section], other_key)
                # as in YAML: true, null, word, 0.0
                text = str(value).lower() if isinstance(value, bool) else str(value)
                text = "null" if value is None else text
                if not (value > float(expected) if sign == ">" else text in expected.split("|")):
                    words = f"more than {expected}" if sign == ">" else expected.replace("|", " or ")
                    name = f"{section}.{key.name}"
                    yield f"{name}: got {other}={text}, expected {words}. Remove {name} or change {other}."


def _find_model_errors(config: RunConfig) -> Iterator[str]:
    """Yield messages for a shape that cannot be built, and for options of it that contradict each other."""
    model, objective = config.model, config.objective
    # imported models have exactly one row per token; only masked text
    # needs a row for [MASK]
    masks = objective.name != "autoregressive" or objective.masked_input_ratio > 0
    spare = 1 if masks and model.mask_id is None else 0
    if model.vocab_rows < model.n_tokens + spare:
        tokens = f"{model.n_tokens} tokens{' and [MASK]' if spare else ''}"
        yield f"model.vocab_rows: got {model.vocab_rows}, expected {tokens}. Remove it."
    if model.positions == "rotary" and model.d_head % 2:
        yield f"model.d_head: got {model.d_head}, expected an even width for rotary positions"
    if model.n_heads % model.kv_heads:
        yield f"model.n_kv_heads: got {model.kv_heads}, expected a divisor of model.n_heads {model.n_heads}"
    # in an order other than left to right the model may also read the
    # last token, otherwise only a target
    n_positions = config.dataset.seq_len + (objective.orders > 1)
    if model.positions == "learned" and (model.n_positions or 0) < n_positions:
        yield (
            f"model.n_positions: got {model.n_positions} learned positions, expected {n_positions} or more "
            f"for dataset.seq_len {config.dataset.seq_len} and objective.orders {objective.orders}"
        )
    # an id outside the vocabulary never occurs,
    # so the mask would have no effect
    if model.document_mask and not 0 <= (model.eod_id or 0) < model.n_tokens:
        yield f"model.eod_id: got {model.eod_id}, expected 0 to {model.n_tokens - 1}"
    if model.mask_id is not None and model.mask_id >= model.n_tokens:
        yield (
            f"model.mask_id: got {model.mask_id}, expected an id below model.n_tokens {model.n_tokens}. "
            "Remove the key if [MASK] is the row after the ids."
        )
    if model.rotary_dims is not None and (model.rotary_dims % 2 or model.rotary_dims > model.d_head):
        yield f"model.rotary_dims: got {model.rotary_dims}, expected an even number up to {model.d_head}"
    if model.rope_scaling == "llama3" and model.rope_original_positions is None:
        yield "model.rope_original_positions: missing, expected with model.rope_scaling=llama3"
    if model.rope_scaling == "llama3" and model.rope_low_factor >= model.rope_high_factor:
        yield (
            f"model.rope_low_factor: got {model.rope_low_factor}, expected less than "
            f"model.rope_high_factor {model.rope_high_factor}"
        )
    # The base has no default: each size would be its own base, and
    # settings would not transfer.
    bases = {"mup": ("base_d_model",), "completep": ("base_d_model", "base_n_layers")}
    for key in bases.get(model.parametrization, ()):
        if getattr(model, key) is None:
            yield (
                f"model.{key}: missing, expected for parametrization '{model.parametrization}'. Set it to "
                "the base shape's value, which is the same for every size of a study."
            )
    if objective.orders > 1 and model.document_mask:
        yield (
            "objective.orders: got an order over the whole sample together with model.document_mask, which "
            "splits samples. Choose one of the two."
        )


def _find_run_errors(config: RunConfig) -> Iterator[str]:
    """Yield messages for other sections."""
    objective, checkpoint, window = config.objective, config.checkpoint, config.logging.profile_steps
    if (objective.low_noise_start is None) != (objective.low_noise_iterations is None):
        yield "objective: got one of low_noise_start and low_noise_iterations, expected both or neither"
    # synthetic tokens do not repeat unless unique_tokens limits them
    endless = config.dataset.path_train == SYNTHETIC and config.dataset.unique_tokens is None
    if endless and config.lr_scheduler.total_epochs is not None:
        yield (
            "lr_scheduler.total_epochs: synthetic tokens have no epochs; set total_iterations, or "
            "dataset.unique_tokens to repeat them"
        )
    if window is not None and (len(window) != 2 or not 1 <= window[0] <= window[1]):
        yield f"logging.profile_steps: got {window}, expected [first, last], counted from 1"
    if not checkpoint.prefix or "/" in checkpoint.prefix:
        yield (
            f"checkpoint.prefix: got {checkpoint.prefix!r}, expected the first part of a file name. Set "
            "folders with checkpoint.directory."
        )
    for step in checkpoint.chkpt_at or ():
        if step < 1:
            yield f"checkpoint.chkpt_at: got {step}, expected 1 or more (steps are counted from 1)"


def _find_length_errors(length: LrSchedulerConfig) -> Iterator[str]:
    """Yield messages for a length that is set in no unit or in several."""
    for what, keys, least in (
        ("the length", ("total_iterations", "total_tokens", "total_epochs"), 1),
        ("the warm-up", ("warmup_iterations", "warmup_tokens", "warmup_fraction"), 0),
        ("the decay", ("decay_iterations", "decay_tokens", "decay_fraction"), 0),
    ):
        n_set = sum(getattr(length, key) is not None for key in keys)
        if not least <= n_set <= 1:
            several = ", not as two of them" if n_set else ""
            yield f"lr_scheduler: give {what} as either {', '.join(keys[:-1])} or {keys[-1]}{several}"


def _find_engine_errors(dist: DistConfig) -> Iterator[str]:
    """Yield messages for a device, dtype or engine that does not support a stage."""
    if dist.engine != "torch" and dist.sharding_stage in HYBRID:
        yield (
            f"dist.sharding_stage: got {dist.sharding_stage}, expected zero0, zero1, zero2 or zero3 with "
            f"dist.engine={dist.engine}"
        )
    if dist.pipeline_parallel > 1 and dist.sharding_stage not in ("zero0", "zero1"):
        yield (
            f"dist.sharding_stage: {dist.sharding_stage} would gather the weights for every microbatch of "
            f"pipeline_parallel {dist.pipeline_parallel}. Use zero0 or zero1."
        )


def _find_parallel_errors(config: RunConfig) -> Iterator[str]:
    """Yield messages for sizes of the axes that do not divide the shape, for any number of ranks."""
    dist, model = config.dist, config.model
    axes = f"dist.tensor_parallel {dist.tensor_parallel} x context_parallel {dist.context_parallel}"
    # the heads of a tensor rank are split again over the context ranks, and
    # outside attention and MLP the positions of a context rank over tensor
    # ranks (sequence parallelism)
    split = dist.tensor_parallel * dist.context_parallel
    for name, size, n in (
        ("model.n_heads", model.n_heads, split),
        ("model.n_kv_heads", model.kv_heads, split),
        ("model.d_ff", model.d_ff, dist.tensor_parallel),
        ("model.vocab_rows", model.vocab_rows, dist.tensor_parallel),
        ("dataset.seq_len", config.dataset.seq_len, split),
    ):
        if size % n:
            yield f"{name}: got {size}, expected a multiple of {n} for {axes}. Change one of them."
    # interleaved: each rank has pipeline_chunks stages, and every stage
    # needs a block
    stages = dist.pipeline_parallel * (dist.pipeline_chunks if dist.pipeline_schedule == "interleaved" else 1)
    if model.n_layers < stages:
        yield f"dist.pipeline_parallel: {stages} stages for model.n_layers {model.n_layers} blocks; use fewer"
