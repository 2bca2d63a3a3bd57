"""Each engine rejects the settings that it does not support."""

from typing import Any

import pytest

from megatron.config.check import check_engine
from megatron.config.schema import DistConfig, OptimConfig


@pytest.mark.parametrize(
    ("dist", "sentence"),
    [
        (
            {"offload_optimizer": True},
            "dist.offload_optimizer: got dist.sharding_stage=zero0, expected zero1",
        ),
        (
            {"offload_parameters": True, "sharding_stage": "zero2"},
            "got dist.sharding_stage=zero2, expected zero3",
        ),
        ({"sharding_stage": "zero3_hybrid"}, "dist.sharding_stage: got zero3_hybrid, expected zero0"),
        ({"tensor_parallel": 2}, "dist.tensor_parallel=2: got dist.engine=deepspeed, expected torch"),
        ({"pipeline_parallel": 2}, "expected torch. Set dist.engine=torch, which supports them with zero0"),
        ({"context_parallel": 2}, "dist.context_parallel=2: got dist.engine"),
        ({"cpu_offload": True, "sharding_stage": "zero3"}, "dist.cpu_offload=True: got dist.engine"),
        ({"compile": True, "float8": True}, "dist.compile=True, dist.float8=True: got dist.engine"),
    ],
)
def test_settings_that_deepspeed_does_not_support_are_refused(dist: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_engine(DistConfig(engine="deepspeed", **dist), OptimConfig())


def test_deepspeed_refuses_the_apex_kernel() -> None:
    with pytest.raises(ValueError, match="optim.kernel=apex: got dist.engine=deepspeed, expected torch"):
        check_engine(DistConfig(engine="deepspeed"), OptimConfig(kernel="apex"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("offload_optimizer", True), ("offload_parameters", True), ("deepspeed_config", "a.json")],
)
def test_torch_refuses_settings_of_deepspeed(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"dist.{key}={value}: got dist.engine=torch, expected deepspeed"):
        check_engine(DistConfig(**{key: value}), OptimConfig())


@pytest.mark.parametrize(("engine", "stage"), [("torch", "zero3_hybrid"), ("deepspeed", "zero3")])
def test_default_settings_work_with_both_engines(engine: str, stage: str) -> None:
    check_engine(DistConfig(engine=engine, sharding_stage=stage), OptimConfig())
