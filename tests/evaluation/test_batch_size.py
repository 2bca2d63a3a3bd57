"""Tests of the automatic batch size with simulated times and memory."""

from collections.abc import Callable

import pytest
import torch

from megatron.config.schema import ModelConfig
from megatron.evaluation import batch_size
from megatron.evaluation.batch_size import choose_batch_size
from megatron.model.transformer import Gpt
from megatron.parallel.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # a pass costs 1 s plus 0.1 s per row: 1.46 rows/s at 2, 4.4 at 8, ..., 9.4 at 128, 9.7 at 256
        (lambda size: 1 + 0.1 * size, 128),
        (lambda size: 0.1 * size, 1),  # a row costs the same at every size
        (lambda size: 0.01, 1024),  # free: the limit
        (lambda size: 0.01 if size <= 64 else None, 32),  # 128 rows do not fit: half of 64
        (lambda size: None, 1),
        (lambda size: 15 + size, 8),  # 23 s: a larger pass would take too long
    ],
)
def test_the_size_doubles_while_it_fits_and_pays(
    seconds: Callable[[int], float | None], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_size, "_time_pass", lambda model, size, length, causal: seconds(size))
    model = Gpt(ModelConfig(d_model=8, d_ff=16, d_head=4, n_heads=2, n_layers=1, n_tokens=32, vocab_rows=32))
    assert choose_batch_size(model, 16, True, ALONE) == expected


def test_a_pass_out_of_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gpt(ModelConfig(d_model=8, d_ff=16, d_head=4, n_heads=2, n_layers=1, n_tokens=32, vocab_rows=32))
    sizes = []

    def hidden_states(tokens: torch.Tensor, causal: bool) -> torch.Tensor:
        sizes.append(len(tokens))
        if len(tokens) > 4:
            raise torch.OutOfMemoryError("simulated")
        return torch.zeros(*tokens.shape, 8)

    monkeypatch.setattr(model, "hidden_states", hidden_states)
    monkeypatch.setattr(batch_size, "GAIN", 0.0)
    assert choose_batch_size(model, 16, True, ALONE) == 2
    assert sizes == [1, 1, 2, 4, 8]
