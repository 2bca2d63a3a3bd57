"""The loss scale of float16 where DeepSpeed keeps it: torch's own scaler at stage 0, else its optimizer's."""

from typing import Any

import torch
from torch import Tensor


def loss_scale_of(engine: Any) -> dict[str, Tensor] | None:
    """What `LossScale.state` of the torch engine tells; None where nothing is scaled."""
    scaler = engine.torch_autocast_z0_gradscaler
    if scaler is not None:
        told = scaler.state_dict()
        return _state(told["scale"], told["_growth_tracker"])
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return None
    return _state(scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter - 1)


def set_loss_scale(engine: Any, state: dict[str, Tensor]) -> None:
    """Undo `loss_scale_of`."""
    scale, good_steps = float(state["scale"]), int(state["good_steps"])
    scaler = engine.torch_autocast_z0_gradscaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": good_steps})
        return
    scaler = engine.optimizer.loss_scaler
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = scale, good_steps, -1


def _state(scale: float, good_steps: int) -> dict[str, Tensor]:
    return {"scale": torch.tensor(float(scale)), "good_steps": torch.tensor(good_steps, dtype=torch.int32)}
