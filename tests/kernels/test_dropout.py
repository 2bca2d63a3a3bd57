"""Attention dropout: its rate, and its dependence on the sample's key only."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megatron.config.schema import ModelConfig
from megatron.kernels.dropout import attend_with_dropout, derive_layer_key, draw_keep_mask, drop_hidden
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt


def test_the_dropped_share_is_the_rate_along_every_axis() -> None:
    keys = derive_layer_key(torch.arange(40) * 2**33 + 5, layer=0)
    drops = ~draw_keep_mask(keys, n_heads=6, n_queries=30, n_keys=30, rate=0.3)
    assert drops.shape == (40, 6, 30, 30)
    for axis in range(4):
        others = [i for i in range(4) if i != axis]
        share = drops.double().mean(dim=others)
        n = drops.numel() / drops.shape[axis]
        assert (share - 0.3).abs().max() < 5 * math.sqrt(0.3 * 0.7 / n)
    flat = drops.double().flatten(1) - 0.3  # draws of different keys are uncorrelated
    correlation = (flat @ flat.T / flat.shape[1] / 0.21).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(flat.shape[1])


def test_blocks_and_samples_have_different_keys() -> None:
    keys = torch.tensor([7, 8, 7 + 2**40])
    of_layers = torch.stack([derive_layer_key(keys, layer) for layer in range(12)])
    assert len(of_layers.unique()) == 36


@pytest.mark.parametrize("causal", [True, False])
def test_rate_zero_and_the_mean_over_keys_equal_plain_attention(causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 4, generator=generator)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.5)
    none = attend_with_dropout(q, k, v, 0.5, causal, None, torch.tensor([3]), 0.0)
    torch.testing.assert_close(none, whole)
    many = 4000
    repeated = (x.expand(many, -1, -1, -1) for x in (q, k, v))
    dropped = attend_with_dropout(*repeated, 0.5, causal, None, torch.arange(many), 0.25)
    error = dropped.std(0) / math.sqrt(many)
    assert ((dropped.mean(0) - whole[0]).abs() <= 5 * error + 1e-6).all()
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    masked = attend_with_dropout(q, k, v, 0.5, causal, mask, torch.tensor([3]), 0.0)
    torch.testing.assert_close(masked, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5))


def test_hidden_dropout_keeps_the_expectation_and_drops_a_share_of_independent_features() -> None:
    x, keys = torch.ones(64, 5, 32, dtype=torch.float64), torch.arange(64)
    first, second = (drop_hidden(x, keys, place, 0.25) for place in (0, 1))
    assert set(first.unique().tolist()) == {0.0, 1 / 0.75}
    dropped = torch.stack([first == 0, second == 0]).double()
    n = x.numel()
    assert ((dropped.mean((1, 2, 3)) - 0.25).abs() < 5 * math.sqrt(0.25 * 0.75 / n)).all()
    both = (dropped[0] * dropped[1]).mean()
    assert abs(both - 0.0625) < 5 * math.sqrt(0.0625 * 0.9375 / n)
    assert torch.equal(drop_hidden(x, keys, 0, 0.0), x)


ATTENTION, HIDDEN = {"attention_dropout": 0.3}, {"hidden_dropout": 0.3}


@pytest.mark.parametrize("rates", [ATTENTION, HIDDEN, ATTENTION | HIDDEN])
def test_dropout_depends_on_the_sample_only_and_is_off_in_evaluation(rates: dict[str, float]) -> None:
    shape = ModelConfig(
        d_model=16, d_ff=32, d_head=8, n_heads=2, n_layers=2, n_tokens=20, vocab_rows=128, **rates
    )  # fmt: skip
    model = Gpt(shape)
    init_weights(model, seed=0)
    tokens = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(0))
    keys = torch.tensor([11, 12, 13])
    with torch.no_grad():
        together = model.train()(tokens, True, dropout_key=keys)
        torch.testing.assert_close(model(tokens[1:2], True, dropout_key=keys[1:2])[0], together[1])
        assert not torch.equal(model(tokens, True, dropout_key=keys + 1), together)
        with pytest.raises(AssertionError, match="keys"):
            model(tokens, True)
        plain = model.eval()(tokens, True)
        assert not torch.allclose(plain, together)
        assert torch.equal(model(tokens, True, dropout_key=keys), plain)
