"""What a position depends on. tests/checkpoint/test_hub_folders.py has every shape against transformers."""

from typing import Any

import pytest
import torch

from megatron.config.presets import padded_rows
from megatron.config.schema import ModelConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt


def build_small(**more: Any) -> Gpt:
    shape = {"d_model": 32, "d_ff": 64, "d_head": 8, "n_heads": 4, "n_layers": 2, "n_tokens": 50}
    model = Gpt(ModelConfig(**{**shape, "vocab_rows": padded_rows(50), **more})).eval()
    init_weights(model, seed=0)
    return model.requires_grad_(False)


def test_a_causal_position_does_not_depend_on_later_tokens() -> None:
    model = build_small()
    tokens = torch.randint(0, 50, (1, 20), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 50
    before, after = model(tokens, causal=True), model(changed, causal=True)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])
    both_sides = model(tokens, causal=False) - model(changed, causal=False)
    assert both_sides.abs().amax(-1).min() > 0


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_masked_document_has_the_logits_of_that_document_alone(causal: bool, positions: str) -> None:
    model = build_small(document_mask=True, eod_id=7, positions=positions, n_positions=20)
    parts = [[3, 4, 5, 7], [7], [9, 10, 11, 12, 13, 7], [1, 2]]  # one is empty, one has no end
    whole = torch.tensor([sum(parts, [])])
    together = model(whole, causal)[0]
    alone = [model(torch.tensor([part]), causal)[0] for part in parts]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_explicit_positions_and_visibility_are_used() -> None:
    model = build_small()
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    order = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i)) for i in range(2)])
    # without causality, a permuted sequence with its original positions is equivalent
    plain = model(tokens, False)
    moved = model(tokens.gather(1, order), False, positions=order)
    expected = plain.gather(1, order[:, :, None].expand_as(plain))
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-6)
    # a position that attends to itself only depends on its token only
    alone = model(tokens, True, visible=torch.eye(12, dtype=torch.bool).expand(2, -1, -1))
    single = model(tokens.reshape(-1, 1), True, positions=torch.zeros(24, 1, dtype=torch.long))
    torch.testing.assert_close(alone.reshape(24, -1), single.reshape(24, -1), rtol=1e-5, atol=1e-6)
