"""Settings from a DeepSpeed JSON file: keys that the YAML leaves open are taken over from it.

The JSON of `dist.deepspeed_config` often repeats what the configuration
has: stage, dtype, batch, clipping, offload, AdamW. A key that the YAML
or the command line does not set gets the file's value, before any key
is checked. Values that contradict set keys are refused where the engine
is built (engine/deepspeed). "auto", as in transformers, leaves a key to
the configuration.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STAGES = (0, 1, 2, 3)
# JSON's number -> our key; each is the same quantity on both sides
NUMBERS = {
    "gradient_clipping": "optim.grad_clip",
    "train_batch_size": "dataset.batch_size",
    "train_micro_batch_size_per_gpu": "dataset.microbatch_size",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "optimizer.params.betas.0": "optim.beta1",
    "optimizer.params.betas.1": "optim.beta2",
}
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}
# DeepSpeed offloads the optimizer from stage 1 on, the weights at stage
# 3 only
OFFLOADS = {
    "zero_optimization.offload_optimizer.device": ("dist.offload_optimizer", 1),
    "zero_optimization.offload_param.device": ("dist.offload_parameters", 3),
}


def adopt_deepspeed_json(raw: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration with its open keys set by its DeepSpeed JSON, and a line for each of these keys.

    Without a readable JSON object nothing is adopted: the error belongs
    to the engine that needs the file.
    """
    try:
        config = json.loads(Path(raw["dist"]["deepspeed_config"]).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return raw, []
    result = {name: dict(section) if isinstance(section, dict) else section for name, section in raw.items()}
    adopted = []
    for source, key, value in _list_values(config):
        section, _, name = key.partition(".")
        target = result.setdefault(section, {})
        if isinstance(target, dict) and target.get(name) is None:
            target[name] = value
            adopted.append(f"{source}  {key}={value}")
    return result, adopted


def _list_values(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (key of the JSON, our key, value) of every value that a key of ours expresses."""
    stage = _find(config, "zero_optimization.stage")
    if stage in STAGES:
        yield "zero_optimization.stage", "dist.sharding_stage", f"zero{stage}"
    for source, (key, lowest) in OFFLOADS.items():
        if stage in STAGES[lowest:] and _find(config, source) == "cpu":
            yield source, key, True
    for name, dtype in DTYPES.items():
        if _find(config, f"{name}.enabled") is True:
            yield f"{name}.enabled", "dist.dtype", dtype
    for source, key in NUMBERS.items():
        value = _find(config, source)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield source, key, value


def _find(config: Any, path: str) -> Any:
    """Return the value at a dotted path, or None; a number is a place in a list."""
    for name in path.split("."):
        try:
            config = config[int(name) if isinstance(config, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return config
