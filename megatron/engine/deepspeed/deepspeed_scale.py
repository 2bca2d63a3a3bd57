"""The float16 loss scale of DeepSpeed: in torch's scaler at ZeRO 0, otherwise in its optimizer."""

from typing import Any

import torch
from torch import Tensor


def get_loss_scale(engine: Any) -> dict[str, Tensor] | None:
    """Return the scale in the form of `LossScale.state_dict` of the torch engine; None without scaling."""
    scaler = engine.torch_autocast_z0_gradscaler
    if scaler is not None:
        state = scaler.state_dict()
        return _build_state(state["scale"], state["_growth_tracker"])
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return None
    # DeepSpeed counts iterations since the last overflow; good_steps is the number of steps without one
    return _build_state(scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter - 1)


def set_loss_scale(engine: Any, state: dict[str, Tensor]) -> None:
    """Set the scale from the result of `get_loss_scale`."""
    scale, good_steps = float(state["scale"]), int(state["good_steps"])
    scaler = engine.torch_autocast_z0_gradscaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": good_steps})
        return
    scaler = engine.optimizer.loss_scaler
    # the inverse of get_loss_scale: good_steps - (-1) - 1 = good_steps
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = scale, good_steps, -1


def _build_state(scale: float, good_steps: int) -> dict[str, Tensor]:
    return {"scale": torch.tensor(float(scale)), "good_steps": torch.tensor(good_steps, dtype=torch.int32)}
