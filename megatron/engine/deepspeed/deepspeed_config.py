"""DeepSpeed's JSON from the run's settings, merged with the JSON of a user."""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron.config.schema import DistConfig, OptimConfig

STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
# DeepSpeed sections that this code base configures
# elsewhere: section -> the key of the run's configuration
OWNED_SECTIONS = {
    "scheduler": "lr_scheduler",
    "amp": "dist.dtype",
    "checkpoint": "checkpoint",
    "data_efficiency": "dataset",
    "curriculum_learning": "dataset",
    "sparse_attention": "model",
    "compression_training": "model",
    "tensor_parallel": "dist",
    "sequence_parallel_size": "dist",
    "pipeline": "dist.pipeline_parallel",
    "activation_checkpointing": "dist.activation_checkpointing",
    "elasticity": "dataset.batch_size",
    "expert_parallel": "model",
    "progressive_layer_drop": "model",
    "weight_quantization": "model",
    "hybrid_engine": "model",
}
# DeepSpeed defaults that the engine relies on without setting them
DEFAULTS = {
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "disable_allgather": False,
    "zero_optimization.cpu_offload": False,
    "zero_optimization.cpu_offload_param": False,
}
ALIASES = {"bfloat16": "bf16"}
HALF_PRECISION = {"bf16": "bfloat16", "fp16": "float16"}
ADAMW = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay"}  # key of DeepSpeed -> key of `optim`


def build_deepspeed_config(
    dist: DistConfig, optim: OptimConfig, n_ranks: int, microbatch_rows: int, n_microbatches: int
) -> dict[str, Any]:
    """Build the `config` of `deepspeed.initialize`; config/check.py has refused unsupported settings.

    Gradients are accumulated and reduced over ranks in float32 for every `dist.dtype`.
    """
    stage = STAGES[dist.sharding_stage]
    in_half = stage > 0 and dist.dtype != "float32"  # stage 0 keeps float32 weights under autocast
    return {
        # DeepSpeed raises an error unless this is the
        # product of the next two and the number of ranks
        "train_batch_size": microbatch_rows * n_microbatches * n_ranks,
        "train_micro_batch_size_per_gpu": microbatch_rows,
        "gradient_accumulation_steps": n_microbatches,
        "gradient_clipping": optim.grad_clip,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu" if dist.offload_optimizer else "none"},
            "offload_param": {"device": "cpu" if dist.offload_parameters else "none"},
        },
        "bf16": {"enabled": in_half and dist.dtype == "bfloat16", "check_grad_overflow": True},
        "fp16": {"enabled": in_half and dist.dtype == "float16"},
        "torch_autocast": _build_autocast_section(stage == 0 and dist.dtype != "float32", dist.dtype),
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def _build_autocast_section(enabled: bool, dtype: str) -> dict[str, Any]:
    # no module is "safe": DeepSpeed would reduce the
    # gradients of such modules in half precision
    return (
        {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
        if enabled
        else {"enabled": False}
    )


# keys that a user's JSON may set to other values: they do not change the result
OVERRIDABLE = (
    "steps_per_print",
    "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer",
    "torch_autocast.lower_precision_safe_modules",
)


def merge_user_config(ours: dict[str, Any], path: str | Path, optim: OptimConfig) -> dict[str, Any]:
    """Merge a user's JSON into `ours`; `"auto"` keeps the value in `ours`, as in transformers.

    Raises FileNotFoundError, or ValueError with every key on which the two disagree.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"dist.deepspeed_config: {path}: no such file")
    try:
        user = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"dist.deepspeed_config: {path}: not JSON ({error})") from error
    if not isinstance(user, dict):
        raise ValueError(f"dist.deepspeed_config: {path}: got {type(user).__name__}, expected a JSON object")
    user = {ALIASES.get(key, key): value for key, value in user.items()}
    user = _drop_equal_settings(user, ours)
    problems = [
        f"{key}: set {owner} instead" for key, owner in OWNED_SECTIONS.items() if _is_enabled(user.get(key))
    ]
    problems += _find_optimizer_conflicts(user.pop("optimizer", None), optim)
    problems += _find_misspelled_keys(user, ours)
    # Compare leaf by leaf under dotted keys. A key
    # unknown to us is passed on to DeepSpeed unchanged.
    # {"zero_optimization": {"stage": 1}} has the leaf
    # zero_optimization.stage = 1. The last two branches below catch
    # a leaf in place of a section and a section in place of a leaf.
    leaves = DEFAULTS | dict(_iterate_leaves(ours))
    for key, value in _iterate_leaves(user):
        if value == "auto" or key in OVERRIDABLE or key in leaves and value == leaves[key]:
            continue
        if key in leaves:
            problems.append(f"{key}: got {value!r}, expected {leaves[key]!r}")
        elif any(leaf.startswith(f"{key}.") for leaf in leaves):
            problems.append(f"{key}: got {value!r}, expected a section of keys")
        elif any(key.startswith(f"{leaf}.") for leaf in leaves):
            problems.append(f"{key}: got {value!r}, expected no section")
    if problems:
        raise ValueError(
            f"dist.deepspeed_config: {path} conflicts with the run's settings: {'; '.join(problems)}. "
            'Change one of them, or write "auto" in the file.'
        )
    # disabled or "auto" here: DeepSpeed must not see these sections at all
    return _merge_configs(ours, {key: value for key, value in user.items() if key not in OWNED_SECTIONS})


def _drop_equal_settings(user: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the user's JSON without settings that say in other words what `ours` does.

    * Stage 0 with bf16 or fp16 enabled: `ours` keeps float32 weights and multiplies under autocast.
    * offload_param below stage 3: DeepSpeed has no partitioned weights to offload, and ignores it.
    """
    user = dict(user)
    autocast = ours["torch_autocast"]
    for name, dtype in HALF_PRECISION.items():
        section = user.get(name)
        equal = autocast["enabled"] and autocast["dtype"] == dtype
        if equal and isinstance(section, dict) and section.get("enabled") is True:
            # other keys of the section belong to an
            # optimizer wrapper that stage 0 lacks
            del user[name]
    zero = user.get("zero_optimization")
    if isinstance(zero, dict) and ours["zero_optimization"]["stage"] < 3:
        section = zero.get("offload_param")
        if isinstance(section, dict) and section.get("device") == "cpu":
            user["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_param"}
    return user


def _is_enabled(section: Any) -> bool:
    """Return whether a section of the user's JSON enables anything; "auto" leaves it to the run."""
    if not isinstance(section, dict):
        return section not in (None, False, "auto")
    if section.get("enabled") is False:
        return False
    values = [value for key, value in _iterate_leaves(section) if key != "type"]
    if "type" in section:
        # a scheduler whose parameters are all "auto" is
        # the run's; without parameters it has its own
        return not values or any(value != "auto" for value in values)
    return any(value not in (None, False, "auto") for value in values)


def _find_misspelled_keys(user: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return errors for unknown keys that resemble a valid one; DeepSpeed would ignore them silently."""
    valid_keys = [*ours, *OWNED_SECTIONS, "optimizer"]
    near = {key: get_close_matches(key, valid_keys, 1, 0.85) for key in user if key not in valid_keys}
    return [f"unknown key {key}, did you mean {names[0]}?" for key, names in near.items() if names]


def _find_optimizer_conflicts(section: Any, optim: OptimConfig) -> list[str]:
    """Return errors for an `optimizer` section that differs from the run's AdamW.

    Equal values are allowed.
    """
    if section is None:
        return []
    params = (section.get("params") or {}) if isinstance(section, dict) else None
    if not isinstance(params, dict):
        return [f"optimizer: got {section!r}, expected a section with type and params"]
    if str(section.get("type", "AdamW")).lower() not in ("adamw", "adam"):
        return [f"optimizer.type: got {section['type']!r}, expected 'AdamW'"]
    ours: dict[str, Any] = {name: getattr(optim, key) for name, key in ADAMW.items()}
    ours["betas"] = [optim.beta1, optim.beta2]
    ours |= {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False}
    return [
        f"optimizer.params.{key}: got {params[key]!r}, expected {value!r}"
        for key, value in ours.items()
        if key in params and params[key] not in ("auto", value)
    ]


def _iterate_leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _iterate_leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _merge_configs(ours: dict[str, Any], user: dict[str, Any]) -> dict[str, Any]:
    """Merge two trees; the user's value wins where both have a leaf, unless it is "auto"."""
    merged = dict(ours)
    for key, value in user.items():
        if isinstance(value, dict):
            section = merged.get(key)
            merged[key] = _merge_configs(section if isinstance(section, dict) else {}, value)
        elif value != "auto":
            merged[key] = value
    return merged
