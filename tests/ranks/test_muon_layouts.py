"""Muon sees whole matrices in every layout; its state and the average of the weights move between layouts."""

from pathlib import Path

import pytest
import torch

from tests.ranks.test_layouts import train
from tests.ranks.train_cases import SAVED_AFTER

MUON = {"optim": {"kind": "muon", "ema_decay": 0.9}}
ON_2 = ["zero0", "zero1", "zero3", "tensor_parallel=2", "pipeline_parallel=2"]
ON_4 = [
    "zero3", "zero3_hybrid shard_size=2", "tensor_parallel=2 zero3", "pipeline_parallel=2 tensor_parallel=2",
    "pipeline_parallel=2 zero1", "tensor_parallel=4", "context_parallel=2 zero2",
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("n_ranks", "layouts"), [(2, ON_2), pytest.param(4, ON_4, marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_updates_equal_those_of_one_rank(tmp_path: Path, n_ranks: int, layouts: list[str]) -> None:
    """By equal gradients: weights and moments after three updates and a skipped one, to 1e-6."""
    alone = train([{"name": "one", "gradients": True, **MUON}], 1, tmp_path / "one")["one"]
    cases = [{"layout": layout, "gradients": True, **MUON} for layout in layouts]
    for layout, state in train(cases, n_ranks, tmp_path / "many").items():
        torch.testing.assert_close(state["model"], alone["model"], rtol=1e-6, atol=1e-6, msg=layout)
        moments = state["optim"]["state"]
        torch.testing.assert_close(moments, alone["optim"]["state"], rtol=1e-6, atol=1e-6, msg=layout)
        assert moments["blocks.1.mlp.down.weight"].keys() == {"momentum_buffer", "ema"}
        assert moments["embedding.weight"].keys() == {"exp_avg", "exp_avg_sq", "step", "ema"}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_resumes_in_another_layout(tmp_path: Path) -> None:
    """Losses differ more than with AdamW: a last digit of a gradient may change its rounding to bfloat16."""
    single = train([{"name": "one", **MUON}], 1, tmp_path / "one")["one"]
    alone = single["whole"]["losses"]
    common = {"resume": True, "sharded": True, "load": str(tmp_path / "one" / "one.pt"), "microbatches": 2}
    cases = [{"layout": layout, **common, **MUON} for layout in ON_2]
    for layout, result in train(cases, 2, tmp_path / "two").items():
        assert result["whole"]["losses"] == pytest.approx(alone, abs=5e-5), layout
        for kind in ("resumed", "moved", "sharded"):
            assert result[kind]["losses"] == pytest.approx(alone[SAVED_AFTER:], abs=5e-5), (layout, kind)
        assert len(result["averaged"]) == 3
        for scores in result["averaged"]:  # sums over 16 positions
            assert scores == pytest.approx(single["averaged"][0], abs=1e-3), layout
            assert scores != pytest.approx(single["scored"], abs=1e-2), layout
