"""The moving average of the weights, against torch's AveragedModel, and its score."""

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.engine.conftest import build_engine, build_task

DECAY = 0.9


@pytest.mark.parametrize("optim", [{}, {"kind": "muon"}], ids=["adamw", "muon"])
def test_the_average_is_torchs_and_is_scored_beside_the_weights(optim: dict[str, Any]) -> None:
    engine = build_engine(optim={"ema_decay": DECAY, **optim})
    model = engine.passes.model
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    reference.update_parameters(model)  # the first call copies the initial weights
    for step in range(5):
        engine.step([build_task(seed=step)], 0.01)
        reference.update_parameters(model)
    state = engine.state_dict()
    for name, weight in reference.module.named_parameters():
        average = state["optim"]["state"][name]["ema"]
        torch.testing.assert_close(average, weight.detach(), rtol=1e-6, atol=1e-6)
        assert not torch.equal(average, state["model"][name]), name
    other, task = build_engine(), build_task(seed=9)
    other.load_state_dict({"model": {name: p.detach() for name, p in reference.module.named_parameters()}})
    before = engine.score(task)[0]
    with engine.averaged_weights():
        average_nats = engine.score(task)[0]
    torch.testing.assert_close(average_nats, other.score(task)[0], rtol=1e-6, atol=0.0)
    assert torch.equal(engine.score(task)[0], before) and not torch.equal(before, average_nats)
    after = engine.state_dict()
    assert all(torch.equal(after["model"][name], weight) for name, weight in state["model"].items())
