"""Settings that only one of the two engines supports. The other engine rejects them."""

from megatron.config.parallelism import HYBRID
from megatron.config.schema import DistConfig, OptimConfig

# key of `dist` -> default value
TORCH_ONLY = {
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "cpu_offload": False,
    "activation_checkpointing": "none",
    "compile": False,
    "float8": False,
}
DEEPSPEED_ONLY = {"offload_optimizer": False, "offload_parameters": False, "deepspeed_config": None}


def check_engine(dist: DistConfig, optim: OptimConfig) -> None:
    """Raise ValueError with the settings that the engine of a run does not support."""
    if dist.engine == "torch":
        _require_engine(_list_changed_keys(dist, DEEPSPEED_ONLY), "deepspeed", dist.engine)
        return
    if dist.sharding_stage in HYBRID:
        raise ValueError(
            f"dist.sharding_stage: got {dist.sharding_stage}, expected zero0, zero1, zero2 or zero3 with "
            "dist.engine=deepspeed"
        )
    torch_settings = _list_changed_keys(dist, TORCH_ONLY)
    torch_settings += [f"optim.kernel={optim.kernel}"] if optim.kernel != "torch" else []
    _require_engine(torch_settings, "torch", dist.engine)
    if dist.offload_optimizer and dist.sharding_stage == "zero0":
        raise ValueError(
            "dist.offload_optimizer: got dist.sharding_stage=zero0, expected zero1, zero2 or zero3"
        )
    if dist.offload_parameters and dist.sharding_stage != "zero3":
        raise ValueError(
            f"dist.offload_parameters: got dist.sharding_stage={dist.sharding_stage}, expected zero3"
        )


def _list_changed_keys(dist: DistConfig, defaults: dict[str, object]) -> list[str]:
    """Return `dist.key=value` for each key whose value differs from `defaults`."""
    return [
        f"dist.{key}={getattr(dist, key)}" for key, value in defaults.items() if getattr(dist, key) != value
    ]


def _require_engine(settings: list[str], required: str, engine: str) -> None:
    if settings:
        raise ValueError(f"{', '.join(settings)}: got dist.engine={engine}, expected {required}")
