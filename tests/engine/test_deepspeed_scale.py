"""DeepSpeed's loss scale goes into a checkpoint and comes back, from either place where it is kept."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.engine.deepspeed_scale import loss_scale_of, set_loss_scale

pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")


def at_stage_0() -> Any:
    return SimpleNamespace(torch_autocast_z0_gradscaler=torch.amp.GradScaler(device="cpu"), optimizer=None)


def at_stage_1() -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**16, 1000, 1, 1, False)
    return SimpleNamespace(torch_autocast_z0_gradscaler=None, optimizer=SimpleNamespace(loss_scaler=scaler))


@pytest.mark.parametrize("build", [at_stage_0, at_stage_1])
def test_scale_and_good_steps_are_those_of_the_run_before(build) -> None:
    engine = build()
    assert float(loss_scale_of(engine)["scale"]) == 2.0**16
    told = {"scale": torch.tensor(512.0), "good_steps": torch.tensor(7, dtype=torch.int32)}
    set_loss_scale(engine, told)
    found = loss_scale_of(engine)
    assert (float(found["scale"]), int(found["good_steps"])) == (512.0, 7)


def test_good_steps_go_on_counting_to_the_next_doubling() -> None:
    engine = at_stage_1()
    scaler = engine.optimizer.loss_scaler
    set_loss_scale(engine, {"scale": torch.tensor(512.0), "good_steps": torch.tensor(999)})
    scaler.update_scale(False)
    assert (scaler.cur_scale, int(loss_scale_of(engine)["good_steps"])) == (512.0, 1000)
    scaler.update_scale(False)
    assert scaler.cur_scale == 1024.0


def test_without_scaling_there_is_none() -> None:
    engine = SimpleNamespace(torch_autocast_z0_gradscaler=None, optimizer=torch.optim.SGD([torch.zeros(1)]))
    assert loss_scale_of(engine) is None
