"""What only one of the two engines can do; the other refuses it instead of leaving it out in silence."""

from megatron.config.layout import HYBRID
from megatron.config.schema import DistConfig, OptimConfig

# key of `dist` -> what it is where nobody asks for anything
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
    """ValueError that names the settings which the engine of a run cannot honour."""
    if dist.engine == "torch":
        _refuse(_told(dist, DEEPSPEED_ONLY), "deepspeed", dist.engine)
        return
    if dist.sharding_stage in HYBRID:
        raise ValueError(
            f"dist.sharding_stage: {dist.sharding_stage} is the torch engine's; with deepspeed use "
            "zero0, zero1, zero2 or zero3"
        )
    others = _told(dist, TORCH_ONLY)
    others += [f"optim.kernel={optim.kernel}"] if optim.kernel != "torch" else []
    _refuse(others, "torch", dist.engine)
    if dist.offload_optimizer and dist.sharding_stage == "zero0":
        raise ValueError(
            "dist.offload_optimizer: wants dist.sharding_stage zero1, zero2 or zero3, found zero0"
        )
    if dist.offload_parameters and dist.sharding_stage != "zero3":
        raise ValueError(
            f"dist.offload_parameters: wants dist.sharding_stage zero3, found {dist.sharding_stage}"
        )


def _told(dist: DistConfig, plain: dict[str, object]) -> list[str]:
    """`dist.key=value` of each key that is not as plain as here."""
    return [f"dist.{key}={getattr(dist, key)}" for key, value in plain.items() if getattr(dist, key) != value]


def _refuse(told: list[str], wanted: str, found: str) -> None:
    if told:
        raise ValueError(f"{', '.join(told)}: wants dist.engine={wanted}, found {found}")
