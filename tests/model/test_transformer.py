"""The model against Llama of transformers, an independent implementation."""

import pytest
import torch

from megatron.config.schema import ModelConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from tests.model.conftest import LLAMA_NAMES, rename_weights

CONFIG = ModelConfig(d_model=48, d_ff=128, d_head=16, n_heads=4, n_layers=3, n_tokens=200, vocab_rows=256)


@pytest.fixture
def model() -> Gpt:
    built = Gpt(CONFIG)
    init_weights(built, seed=3)
    with torch.no_grad():  # gains other than 1, so that a misplaced norm changes the output
        for i, parameter in enumerate(p for p in built.parameters() if p.ndim == 1):
            parameter.copy_(torch.linspace(0.5, 1.5, CONFIG.d_model) + 0.01 * i)
        for block in built.blocks:
            block.attention.query.weight *= 8  # makes attention clearly non-uniform
    return built


def build_llama(model: Gpt) -> torch.nn.Module:
    """Return a transformers model with the same weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=CONFIG.d_model,
        intermediate_size=CONFIG.d_ff,
        head_dim=CONFIG.d_head,
        num_attention_heads=CONFIG.n_heads,
        num_key_value_heads=CONFIG.n_heads,
        num_hidden_layers=CONFIG.n_layers,
        vocab_size=CONFIG.vocab_rows,
        rms_norm_eps=CONFIG.norm_eps,
        rope_theta=CONFIG.rope_theta,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    llama = transformers.LlamaForCausalLM(config)
    llama.load_state_dict({"lm_head.weight": model.head_weight, **rename_weights(model, LLAMA_NAMES)})
    return llama.eval()


def test_logits_equal_those_of_llama_in_transformers(model: Gpt) -> None:
    tokens = torch.randint(0, 200, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = build_llama(model)(tokens).logits
        torch.testing.assert_close(model(tokens, causal=True), theirs, rtol=1e-5, atol=1e-5)


def test_a_causal_position_does_not_depend_on_later_tokens(model: Gpt) -> None:
    tokens = torch.randint(0, 200, (1, 20), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 200
    with torch.no_grad():
        before, after = model(tokens, causal=True), model(changed, causal=True)
        assert torch.equal(before[:, :12], after[:, :12])
        assert not torch.equal(before[:, 12:], after[:, 12:])
        both_sides = model(tokens, causal=False) - model(changed, causal=False)
    assert both_sides.abs().amax(-1).min() > 0


def test_initial_weights_depend_on_the_seed_alone() -> None:
    first, again, other = Gpt(CONFIG), Gpt(CONFIG), Gpt(CONFIG)
    torch.manual_seed(99)
    init_weights(first, seed=5)
    init_weights(again, seed=5)
    init_weights(other, seed=6)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    # the last matrix of a branch is initialized smaller by sqrt(2 L)
    ratio = first.blocks[0].mlp.up.weight.std() / first.blocks[0].mlp.down.weight.std()
    assert ratio.item() == pytest.approx((2 * CONFIG.n_layers) ** 0.5, rel=0.05)
