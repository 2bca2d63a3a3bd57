"""No engine leaves a setting out in silence."""

from typing import Any

import pytest

from megatron.config.engines import check_engine
from megatron.config.schema import DistConfig, OptimConfig


@pytest.mark.parametrize(
    ("dist", "sentence"),
    [
        ({"offload_optimizer": True}, "dist.offload_optimizer: wants dist.sharding_stage zero1"),
        (
            {"offload_parameters": True, "sharding_stage": "zero2"},
            "wants dist.sharding_stage zero3, found zero2",
        ),
        ({"sharding_stage": "zero3_hybrid"}, "dist.sharding_stage: zero3_hybrid is the torch engine's"),
        ({"tensor_parallel": 2}, "dist.tensor_parallel=2: wants dist.engine=torch, found deepspeed"),
        ({"pipeline_parallel": 2}, "dist.pipeline_parallel=2: wants"),
        ({"context_parallel": 2}, "dist.context_parallel=2: wants"),
        ({"cpu_offload": True, "sharding_stage": "zero3"}, "dist.cpu_offload=True: wants"),
        ({"activation_checkpointing": "selective"}, "dist.activation_checkpointing=selective: wants"),
        ({"compile": True, "float8": True}, "dist.compile=True, dist.float8=True: wants"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(dist: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_engine(DistConfig(engine="deepspeed", **dist), OptimConfig())


def test_deepspeed_has_no_kernel_of_apex() -> None:
    with pytest.raises(ValueError, match="optim.kernel=apex: wants dist.engine=torch, found deepspeed"):
        check_engine(DistConfig(engine="deepspeed"), OptimConfig(kernel="apex"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("offload_optimizer", True), ("offload_parameters", True), ("deepspeed_config", "a.json")],
)
def test_what_is_deepspeeds_alone_is_refused_by_torch(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"dist.{key}={value}: wants dist.engine=deepspeed, found torch"):
        check_engine(DistConfig(**{key: value}), OptimConfig())


@pytest.mark.parametrize(("engine", "stage"), [("torch", "zero3_hybrid"), ("deepspeed", "zero3")])
def test_plain_settings_go_with_either(engine: str, stage: str) -> None:
    check_engine(DistConfig(engine=engine, sharding_stage=stage), OptimConfig())
