"""Keys of exp-maxie's FSDP training stub for detector images, and what becomes of them here.

Names that both have are not listed. Its image model (ViT-MAE) does not exist here, so those keys are refused
by name; keys of its data loader have no effect on tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.log import get_logger

TRANSLATED, NO_EFFECT, REFUSED = "translated", "no effect here", "refused"
log = get_logger(__name__)
Raw = dict[str, Any]


@dataclass(frozen=True)
class StubKey:
    """A key of the stub by its dotted name.

    successor  key here with the same purpose, or empty
    note       translated: the conversion; no effect: why; refused: what it belongs to
    harmless   values with which a refused key changes nothing
    """

    name: str
    outcome: str
    successor: str = ""
    note: str = ""
    harmless: tuple[Any, ...] = ()


def _keys(outcome: str, note: str, successors: dict[str, str]) -> list[StubKey]:
    return [StubKey(name, outcome, successor, note) for name, successor in successors.items()]


LOADER = "tokens are read from memory-mapped files in a seeded order"
IMAGES = "tokens have no image size, channels or transforms"
VISION = "of an image model"
HF = "model.hf_config"
STUB_KEYS: dict[str, StubKey] = {
    key.name: key
    for key in (
        StubKey("lr_scheduler.min_lr", TRANSLATED, "lr_scheduler.lr_min_ratio", "divided by optim.lr"),
        StubKey("misc.compiles_model", TRANSLATED, "dist.compile", "each block"),
        StubKey("misc.sharding_stage", TRANSLATED, "dist.sharding_stage"),
        StubKey("dataset.path_val", TRANSLATED, "dataset.path_eval"),
        StubKey("checkpoint.path_chkpt_prev", TRANSLATED, "checkpoint.resume", "null: auto"),
        StubKey("checkpoint.pretrain", TRANSLATED, "checkpoint.init_from", "weights alone"),
        StubKey("logging.directory", TRANSLATED, "logging.run_dir", "directory/prefix"),
        StubKey("logging.prefix", TRANSLATED, "logging.run_dir", "directory/prefix"),
        StubKey("misc.max_eval_iter", TRANSLATED, "evaluation.max_samples", "times dataset.batch_size"),
        StubKey("misc.max_epochs", TRANSLATED, "lr_scheduler.total_epochs", "unless total_iterations is set"),
        StubKey(f"{HF}.hidden_act", TRANSLATED, "model.feed_forward", "gelu, by its tanh approximation"),
        StubKey(f"{HF}.layer_norm_eps", TRANSLATED, "model.norm_eps"),
        StubKey(f"{HF}.attention_probs_dropout_prob", TRANSLATED, "model.attention_dropout"),
        StubKey(f"{HF}.initializer_range", TRANSLATED, "model.init_std"),
        StubKey(f"{HF}.hidden_dropout_prob", TRANSLATED, "model.hidden_dropout"),
        StubKey("loss.grad_accum_steps", REFUSED, "dataset.batch_size", "samples of all ranks", (1, None)),
        *_keys(
            NO_EFFECT, LOADER,
            dict.fromkeys((
                "dataset.cache_size", "dataset.debug", "dataset.drop_last_in_loader",
                "dataset.drop_last_in_sampler", "dataset.pin_memory", "dataset.prefetch_factor",
                "dataset.seg_size", "misc.max_eval_retry", "dist.uses_unique_world_seed",
            ), ""),
        ),
        *_keys(
            NO_EFFECT, IMAGES,
            dict.fromkeys((
                "dataset.num_channels", "dataset.input.C", "dataset.input.H", "dataset.input.W",
                *(f"dataset.transforms.{name}" for name in (
                    "H_pad", "Hv", "W_pad", "Wv", "angle_max", "frac_shift_max", "num_crop", "num_patch",
                    "sampling_fraction", "sigma", "size_patch", "var_size_patch",
                )),
                *(f"dataset.transforms.set.{name}" for name in (
                    "instance_norm", "uses_instance_norm", "batch_sampler", "pad", "polar_center_crop",
                    "random_patch", "random_rotate", "random_shift",
                )),
            ), "") | {"dataset.input.total_size": "dataset.unique_tokens"},
        ),
        *_keys(
            NO_EFFECT, "stopped runs resume from their own folder",
            {
                "checkpoint.preempt_metadata_path": "checkpoint.resume",
                "checkpoint.preempt_chkpt_saving_iterations": "checkpoint.preempt_every_minutes",
                "model.from_scratch": "checkpoint.init_from",
            },
        ),
        *_keys(
            NO_EFFECT, "always so, or reported otherwise",
            {
                "checkpoint.offload_to_cpu": "",
                "checkpoint.rank0_only": "checkpoint.state_dict_type",
                "optim.fused": "optim.kernel",
                "lr_scheduler.scheduler_update_iterations": "",
                "logging.level": "logging.every_iterations",
                "misc.data_dump_on": "",
                "misc.monitors_dynamics": "logging.profile_steps",
                "misc.peak_flops_per_sec": "",
            },
        ),
        *_keys(
            REFUSED, VISION,
            {
                f"{HF}.image_size": "dataset.seq_len",
                f"{HF}.patch_size": "dataset.seq_len",
                f"{HF}.num_channels": "model.n_tokens",
                f"{HF}.qkv_bias": "model.biases",
                f"{HF}.decoder_num_attention_heads": "model.n_heads",
                f"{HF}.decoder_hidden_size": "model.d_model",
                f"{HF}.decoder_num_hidden_layers": "model.n_layers",
                f"{HF}.decoder_intermediate_size": "model.d_ff",
                f"{HF}.mask_ratio": "objective.name=masked_diffusion",
                f"{HF}.norm_pix_loss": "objective.name",
            },
        ),
    )
}  # fmt: skip
SHARED_HF_KEYS = {f"{HF}.hidden_act", f"{HF}.initializer_range"}


def adopt_stub_keys(raw: Raw) -> Raw:
    """Return settings without the stub's keys: translated, dropped with a line of the log, or refused.

    Raises ValueError with the names of refused keys and their successors, and for a translated key beside
    another value of its successor.
    """
    given = _find_stub_keys(raw)
    if not given:
        return raw
    _refuse_keys(given)
    remaining = _remove(raw, given.keys(), "")
    for name, value in _translate(given, raw).items():
        section, _, key = name.partition(".")
        keys = remaining.get(section) or {}
        if not isinstance(keys, dict):  # the reader of the section reports it
            continue
        remaining[section] = keys = dict(keys)
        before = keys.get(key)
        if before is not None and before != value:
            raise ValueError(
                f"{name}: got {before!r}, but {value!r} from the training stub. Set one of them."
            )
        keys[key] = value
    reasons: dict[str, list[str]] = {}
    for name in given:
        stub_key = STUB_KEYS[name]
        if stub_key.outcome == NO_EFFECT:
            hint = f" (see {stub_key.successor})" if stub_key.successor else ""
            reasons.setdefault(stub_key.note, []).append(f"{name}{hint}")
    for reason, names in reasons.items():
        log.info("no effect here, %s: %s", reason, ", ".join(names))
    return remaining


def _iter_leaves(section: Any, place: str) -> list[tuple[str, Any]]:
    """Return (dotted name, value) of every value that is no section."""
    if not isinstance(section, dict):
        return [(place, section)]
    return [
        leaf for key, value in section.items() for leaf in _iter_leaves(value, f"{place}.{key}".lstrip("."))
    ]


def _find_stub_keys(raw: Raw) -> Raw:
    """Return the stub's keys with their values. A hf_config that is a language model's has none."""
    given = {name: value for name, value in _iter_leaves(raw, "") if name in STUB_KEYS}
    of_hf = {name for name in given if name.startswith(HF)}
    # Llama's hf_config has these two as well; a gelu that is not the stub's would be a gated one
    if of_hf <= SHARED_HF_KEYS or "model_type" in raw["model"]["hf_config"]:
        given = {name: value for name, value in given.items() if name not in of_hf}
    return given


def _remove(section: Raw, names: Any, place: str) -> Raw:
    """Return a copy of nested sections without the named leaves, and without sections that become empty."""
    remaining: Raw = {}
    for key, value in section.items():
        inner = f"{place}{key}"
        if inner in names:
            continue
        if isinstance(value, dict) and value:
            value = _remove(value, names, f"{inner}.")
            if not value:
                continue
        remaining[key] = value
    return remaining


def _refuse_keys(given: Raw) -> None:
    refused = [STUB_KEYS[name] for name, value in given.items() if _is_refused(STUB_KEYS[name], value)]
    vision = [key for key in refused if key.note == VISION]
    if vision:
        words = ", ".join(f"{key.name.rpartition('.')[2]} -> {key.successor}" for key in vision)
        raise ValueError(
            f"{HF}: got keys of an image model, expected a language model's. Remove them: {words}"
        )
    for key in refused:  # loss.grad_accum_steps
        raise ValueError(
            f"{key.name}: got {given[key.name]!r}, expected 1. Set dataset.batch_size to batch_size x "
            "ranks x grad_accum_steps, and dataset.microbatch_size to batch_size."
        )


def _is_refused(key: StubKey, value: Any) -> bool:
    return key.outcome == REFUSED and (not key.harmless or value not in key.harmless)


def _translate(given: Raw, raw: Raw) -> Raw:
    """Return the settings of the given keys that are translated, by their names here."""

    def convert(name: str, reader: Callable[[Any], Any] = lambda value: value) -> Raw:
        value = given.get(name)
        return {} if value is None else {STUB_KEYS[name].successor: reader(value)}

    settings: Raw = {}
    for name in (
        "misc.compiles_model", "misc.sharding_stage", "dataset.path_val", "checkpoint.path_chkpt_prev",
        "checkpoint.pretrain",
    ):  # fmt: skip
        settings |= convert(name)
    numbers = ("layer_norm_eps", "attention_probs_dropout_prob", "hidden_dropout_prob", "initializer_range")
    for name in numbers:
        settings |= convert(f"{HF}.{name}")
    settings |= convert(
        f"{HF}.hidden_act", lambda name: {"silu": "swiglu", "swish": "swiglu"}.get(name, name)
    )
    settings |= convert("lr_scheduler.min_lr", lambda rate: _divide(rate, _number(raw, "optim.lr", 3e-4)))
    settings |= convert("misc.max_eval_iter", lambda n: _multiply(n, _number(raw, "dataset.batch_size", 256)))
    schedule = raw.get("lr_scheduler")
    schedule = schedule if isinstance(schedule, dict) else {}
    if not any(schedule.get(f"total_{unit}") for unit in ("iterations", "tokens", "epochs")):
        settings |= convert("misc.max_epochs")
    elif given.get("misc.max_epochs") is not None:
        log.info(
            "misc.max_epochs: no effect beside the length in lr_scheduler; see lr_scheduler.total_epochs"
        )
    parts = [given.get(f"logging.{name}") for name in ("directory", "prefix")]
    if any(parts):
        settings["logging.run_dir"] = "/".join(
            str(part) for part in (parts[0] or "experiments", parts[1]) if part
        )
    return settings


def _number(raw: Raw, name: str, default: float) -> float:
    section, _, key = name.partition(".")
    keys = raw.get(section)
    value = keys.get(key) if isinstance(keys, dict) else None
    return value if isinstance(value, int | float) and math.isfinite(value) and value > 0 else default


def _divide(value: Any, by: float) -> Any:
    # a value of another type is reported with the name of its successor
    return value / by if isinstance(value, int | float) else value


def _multiply(value: Any, by: float) -> Any:
    return value * int(by) if isinstance(value, int | float) else value
