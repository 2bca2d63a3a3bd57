"""Our settings as DeepSpeed's JSON, and a user's own JSON laid over them."""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron.config.schema import DistConfig, OptimConfig

STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
# sections whose work is done elsewhere: the key that does it
OURS = {
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
# what we leave to DeepSpeed's default and count on
DEFAULTS = {
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "disable_allgather": False,
    "zero_optimization.cpu_offload": False,
    "zero_optimization.cpu_offload_param": False,
}
ALIASES = {"bfloat16": "bf16"}
ADAMW = {"lr": "lr", "eps": "eps", "weight_decay": "weight_decay"}  # theirs -> optim's


def translate(
    dist: DistConfig, optim: OptimConfig, n_ranks: int, microbatch_rows: int, n_microbatches: int
) -> dict[str, Any]:
    """What `deepspeed.initialize` takes; config/engines.py has refused what it cannot honour.

    Gradients are accumulated and added over ranks in float32 whatever the products are in.
    """
    stage = STAGES[dist.sharding_stage]
    in_half = stage > 0 and dist.dtype != "float32"  # stage 0 keeps float32 weights under autocast
    return {
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
        "torch_autocast": _autocast(stage == 0 and dist.dtype != "float32", dist.dtype),
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def _autocast(enabled: bool, dtype: str) -> dict[str, Any]:
    # no module is "safe": for those DeepSpeed would add gradients over ranks in half precision
    return (
        {"enabled": True, "dtype": dtype, "lower_precision_safe_modules": []}
        if enabled
        else {"enabled": False}
    )


# what a user's JSON may set otherwise: it changes how, not what is computed
FREE = (
    "steps_per_print",
    "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer",
    "torch_autocast.lower_precision_safe_modules",
)


def with_users_own(ours: dict[str, Any], path: str | Path, optim: OptimConfig) -> dict[str, Any]:
    """`ours` with a user's JSON over it; `"auto"` stands for ours, as in transformers.

    Raises FileNotFoundError, or ValueError that names each key on which the two disagree.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"dist.deepspeed_config: {path}: no such file")
    try:
        theirs = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"dist.deepspeed_config: {path}: not JSON ({error})") from error
    if not isinstance(theirs, dict):
        raise ValueError(f"dist.deepspeed_config: {path}: wanted an object, found {type(theirs).__name__}")
    theirs = {ALIASES.get(key, key): value for key, value in theirs.items()}
    wrong = [f"{key} is for {ours_is} to say" for key, ours_is in OURS.items() if _asks(theirs.get(key))]
    wrong += _optimizer_contradictions(theirs.pop("optimizer", None), optim)
    wrong += _misspelt(theirs, ours)
    leaves = DEFAULTS | dict(_leaves(ours))
    for key, value in _leaves(theirs):
        if value == "auto" or key in FREE or key in leaves and value == leaves[key]:
            continue
        if key in leaves:
            wrong.append(f"{key} is {value!r}, ours {leaves[key]!r}")
        elif any(leaf.startswith(f"{key}.") for leaf in leaves):
            wrong.append(f"{key} is {value!r}, wanted a section of keys")
        elif any(key.startswith(f"{leaf}.") for leaf in leaves):
            wrong.append(f"{key} is {value!r}, wanted no section there")
    if wrong:
        raise ValueError(
            f"dist.deepspeed_config: {path} contradicts the run's settings: {'; '.join(wrong)}; "
            'change one side, or write "auto" there'
        )
    return _merged(ours, theirs)


def _asks(section: Any) -> bool:
    """Whether a section of theirs wants anything at all."""
    return section not in (None, False, {}) and not (
        isinstance(section, dict) and section.get("enabled") is False
    )


def _misspelt(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Keys that DeepSpeed would pass over in silence, and that are nearly one of those we know."""
    known = [*ours, *OURS, "optimizer"]
    near = {key: get_close_matches(key, known, 1, 0.85) for key in theirs if key not in known}
    return [f"{key} is no key, did you mean {names[0]}?" for key, names in near.items() if names]


def _optimizer_contradictions(section: Any, optim: OptimConfig) -> list[str]:
    if section is None:
        return []
    told = (section.get("params") or {}) if isinstance(section, dict) else None
    if not isinstance(told, dict):
        return [f"optimizer is {section!r}, wanted a section with type and params"]
    if str(section.get("type", "AdamW")).lower() not in ("adamw", "adam"):
        return [f"optimizer.type is {section['type']!r}, ours 'AdamW'"]
    ours: dict[str, Any] = {name: getattr(optim, mine) for name, mine in ADAMW.items()}
    ours["betas"] = [optim.beta1, optim.beta2]
    ours |= {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "maximize": False}
    return [
        f"optimizer.params.{key} is {told[key]!r}, ours {value!r}"
        for key, value in ours.items()
        if key in told and told[key] not in ("auto", value)
    ]


def _leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _merged(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Both trees as one; theirs where both have a leaf, unless it is "auto"."""
    merged = dict(ours)
    for key, value in theirs.items():
        if isinstance(value, dict):
            held = merged.get(key)
            merged[key] = _merged(held if isinstance(held, dict) else {}, value)
        elif value != "auto":
            merged[key] = value
    return merged
