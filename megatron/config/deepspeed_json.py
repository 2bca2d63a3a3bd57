"""Settings from a DeepSpeed JSON file: keys that the YAML leaves open are taken over from it.

The JSON of `dist.deepspeed_config` often repeats what the configuration has: stage, dtype, batch, clipping,
offload, AdamW. A key that the YAML or the command line does not set gets the file's value, before any key is
checked. Values that contradict set keys are refused where the engine is built (engine/deepspeed). "auto", as
in transformers, leaves a key to the configuration.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AUTO = "auto"
STAGES = (0, 1, 2, 3)
# JSON's number -> our key; each is the same quantity on both sides
NUMBERS = {
    "gradient_clipping": "optim.grad_clip",
    "train_batch_size": "dataset.batch_size",
    "train_micro_batch_size_per_gpu": "dataset.microbatch_size",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.eps": "optim.eps",
    "optimizer.params.weight_decay": "optim.weight_decay",
}
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class AdoptedValue:
    """One value of the JSON, and the key that took it over."""

    source: str
    key: str
    value: Any


def adopt_deepspeed_json(raw: dict[str, Any]) -> tuple[dict[str, Any], list[AdoptedValue]]:
    """Return a configuration with its open keys set by its DeepSpeed JSON, and the list of these keys.

    Without a readable JSON object nothing is adopted: the error belongs to the engine that needs the file.
    """
    dist = raw.get("dist")
    path = dist.get("deepspeed_config") if isinstance(dist, dict) else None
    if not isinstance(path, str) or not Path(path).is_file():
        return raw, []
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return raw, []
    if not isinstance(config, dict):
        return raw, []
    result = {name: dict(section) if isinstance(section, dict) else section for name, section in raw.items()}
    adopted = []
    for source, key, value in _list_values(config):
        section, _, name = key.partition(".")
        target = result.setdefault(section, {})
        if isinstance(target, dict) and target.get(name) is None:
            target[name] = value
            adopted.append(AdoptedValue(source, key, value))
    return result, adopted


def _list_values(config: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (key of the JSON, our key, value) of every value that a key of ours expresses."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if isinstance(zero, dict) and stage in STAGES and "stage" in zero:
        yield "zero_optimization.stage", "dist.sharding_stage", f"zero{stage}"
        # DeepSpeed offloads the optimizer from stage 1 on, the weights at stage 3 only
        for name, key, lowest in (
            ("offload_optimizer", "dist.offload_optimizer", 1),
            ("offload_param", "dist.offload_parameters", 3),
        ):
            section = zero.get(name)
            if isinstance(section, dict) and section.get("device") == "cpu" and stage >= lowest:
                yield f"zero_optimization.{name}.device", key, True
    for name, dtype in DTYPES.items():
        section = config.get(name)
        if isinstance(section, dict) and section.get("enabled") is True:
            yield f"{name}.enabled", "dist.dtype", dtype
    for source, key in NUMBERS.items():
        value = _find(config, source)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield source, key, value
    betas = _find(config, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2 and AUTO not in betas:
        yield "optimizer.params.betas[0]", "optim.beta1", betas[0]
        yield "optimizer.params.betas[1]", "optim.beta2", betas[1]


def _find(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def format_adopted(adopted: list[AdoptedValue]) -> str:
    """Return a table with a line for each value."""
    width = max(len(value.source) for value in adopted)
    return "\n".join(f"  {value.source:<{width}}  {value.key}={value.value}" for value in adopted)
