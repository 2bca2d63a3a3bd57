"""DeepSpeed's loss scale is saved and restored, at stage 0 and at higher stages."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.engine.deepspeed.deepspeed_state import get_loss_scale, set_loss_scale

pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")


def build_stage_0() -> Any:
    return SimpleNamespace(torch_autocast_z0_gradscaler=torch.amp.GradScaler(device="cpu"), optimizer=None)


def build_stage_1() -> Any:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**16, 1000, 1, 1, False)
    return SimpleNamespace(torch_autocast_z0_gradscaler=None, optimizer=SimpleNamespace(loss_scaler=scaler))


@pytest.mark.parametrize("build", [build_stage_0, build_stage_1])
def test_scale_and_good_steps_are_restored(build) -> None:
    engine = build()
    assert float(get_loss_scale(engine)["scale"]) == 2.0**16
    state = {"scale": torch.tensor(512.0), "good_steps": torch.tensor(7, dtype=torch.int32)}
    set_loss_scale(engine, state)
    restored = get_loss_scale(engine)
    assert (float(restored["scale"]), int(restored["good_steps"])) == (512.0, 7)


def test_good_steps_continue_to_the_next_doubling() -> None:
    engine = build_stage_1()
    scaler = engine.optimizer.loss_scaler
    set_loss_scale(engine, {"scale": torch.tensor(512.0), "good_steps": torch.tensor(999)})
    scaler.update_scale(False)
    assert (scaler.cur_scale, int(get_loss_scale(engine)["good_steps"])) == (512.0, 1000)
    scaler.update_scale(False)
    assert scaler.cur_scale == 1024.0


def test_without_scaling_the_state_is_none() -> None:
    engine = SimpleNamespace(torch_autocast_z0_gradscaler=None, optimizer=torch.optim.SGD([torch.zeros(1)]))
    assert get_loss_scale(engine) is None
