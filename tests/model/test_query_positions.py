"""Partial computation: selected positions, and causal attention that skips masked keys."""

from collections.abc import Callable

import pytest
import torch

from megatron.kernels import attention
from megatron.model.transformer import Gpt

N = 150
TOKENS = torch.randint(0, 40, (3, N), generator=torch.Generator().manual_seed(0))
QUERY_POSITIONS = torch.tensor([[0, 1, N - 1, 0], [70, 3, 3, 149], [5, 6, 7, 8]])
PART = torch.arange(N) * 3 // N  # a shared prefix, then two parts that are hidden from each other
MODEL_KWARGS = {
    "visible": ((PART[None] == 0) | (PART[None] == PART[:, None])).expand(3, -1, -1),
    "positions": torch.where(PART == 2, torch.arange(N) - N // 3, torch.arange(N)).expand(3, -1),
}
SHAPES = [{}, {"positions": "learned", "n_positions": N}, {"document_mask": True, "eod_id": 9}]
SHAPES += [{"attention_window": 20, "norm_placement": "output"}, {"predicts_next": True}, {"rotary_dims": 2}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("model_kwargs", [{}, MODEL_KWARGS])
def test_selected_positions_equal_those_of_the_full_output(
    shape: dict[str, object], causal: bool, model_kwargs: dict[str, torch.Tensor], tiny_of: Callable[..., Gpt]
) -> None:
    if "attention_window" in shape and not causal:
        pytest.skip("windows are causal")
    model = tiny_of(n_tokens=40, **shape)
    whole = model.hidden_states(TOKENS, causal, **model_kwargs)
    expected = torch.stack([states[places] for states, places in zip(whole, QUERY_POSITIONS, strict=True)])
    result = model.hidden_states(TOKENS, causal, query_positions=QUERY_POSITIONS, **model_kwargs)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_kwargs", [{}, MODEL_KWARGS])
def test_causal_attention_in_blocks_equals_plain_attention(
    model_kwargs: dict[str, torch.Tensor], tiny: Gpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are used without gradients; here there are three, the last of them shorter."""
    at_once = tiny.hidden_states(TOKENS, True, **model_kwargs)
    blocks = []
    attend_in_blocks = attention.attend_in_query_blocks
    record = lambda *args: blocks.append(args) or attend_in_blocks(*args)  # noqa: E731
    monkeypatch.setattr(attention, "attend_in_query_blocks", record)
    tiny.hidden_states(TOKENS, True, **model_kwargs)
    assert not blocks
    with torch.no_grad():
        result = tiny.hidden_states(TOKENS, True, **model_kwargs)
        assert len(blocks) == len(tiny.blocks)
        tiny.hidden_states(TOKENS, False)
        assert len(blocks) == len(tiny.blocks)  # bidirectional attention has no keys to skip
    torch.testing.assert_close(result, at_once, rtol=1e-4, atol=1e-4)


def test_a_window_counts_positions_and_not_places(tiny_of: Callable[..., Gpt]) -> None:
    """Two continuations of one text in one row equal each of them in a row of its own."""
    model = tiny_of(n_tokens=40, attention_window=20)
    packed = model.hidden_states(TOKENS, True, **MODEL_KWARGS)
    third = N // 3
    alone = model.hidden_states(torch.cat([TOKENS[:, :third], TOKENS[:, 2 * third :]], dim=1), True)
    torch.testing.assert_close(packed[:, 2 * third :], alone[:, third:], rtol=1e-4, atol=1e-4)
    without = tiny_of(n_tokens=40).hidden_states(TOKENS, True)
    assert (without[:, :20] - model.hidden_states(TOKENS, True)[:, :20]).abs().max() < 1e-5
    assert (without[:, 20:] - model.hidden_states(TOKENS, True)[:, 20:]).abs().max() > 1e-3
