"""Computing less than everything: chosen positions, and keys that a causal query does not see."""

from collections.abc import Callable

import pytest
import torch

from megatron.model import attention
from megatron.model.gpt import Gpt

N = 150
TOKENS = torch.randint(0, 40, (3, N), generator=torch.Generator().manual_seed(0))
ASKED = torch.tensor([[0, 1, N - 1, 0], [70, 3, 3, 149], [5, 6, 7, 8]])
PART = torch.arange(N) * 3 // N  # a shared beginning, then two parts that do not see one another
READING = {
    "visible": ((PART[None] == 0) | (PART[None] == PART[:, None])).expand(3, -1, -1),
    "positions": torch.where(PART == 2, torch.arange(N) - N // 3, torch.arange(N)).expand(3, -1),
}
SHAPES = [{}, {"positions": "learned", "n_positions": N}, {"document_mask": True, "eod_id": 9}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reading", [{}, READING])
def test_chosen_positions_are_those_of_the_whole(
    shape: dict[str, object], causal: bool, reading: dict[str, torch.Tensor], tiny_of: Callable[..., Gpt]
) -> None:
    model = tiny_of(n_tokens=40, **shape)
    whole = model.hidden(TOKENS, causal, **reading)
    expected = torch.stack([states[places] for states, places in zip(whole, ASKED, strict=True)])
    found = model.hidden(TOKENS, causal, asked=ASKED, **reading)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reading", [{}, READING])
def test_causal_queries_in_blocks_see_what_they_see_at_once(
    reading: dict[str, torch.Tensor], tiny: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are for reading without gradients; three of them here, the last one shorter."""
    at_once = tiny.hidden(TOKENS, True, **reading)
    blocks = []
    in_blocks = attention.Mixing._in_blocks
    monkeypatch.setattr(attention.Mixing, "_in_blocks", lambda *told: blocks.append(told) or in_blocks(*told))
    tiny.hidden(TOKENS, True, **reading)
    assert not blocks
    with torch.no_grad():
        found = tiny.hidden(TOKENS, True, **reading)
        assert len(blocks) == len(tiny.blocks)
        tiny.hidden(TOKENS, False)
        assert len(blocks) == len(tiny.blocks)  # seen from both sides there is nothing to skip
    torch.testing.assert_close(found, at_once, rtol=1e-4, atol=1e-4)
