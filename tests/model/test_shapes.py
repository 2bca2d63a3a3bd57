"""Every shape option against an independent implementation in transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.config.hf import shape_from_hf
from megatron.config.presets import padded_rows
from megatron.config.schema import ModelConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from tests.model.conftest import LLAMA_NAMES, rename_weights

transformers = pytest.importorskip("transformers")

GPT2_NAMES = {
    "embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "blocks": "transformer.h",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
SMALL = {"num_hidden_layers": 2, "vocab_size": 99, "max_position_embeddings": 64, "intermediate_size": 80}


def build_model(config: Any, **more: Any) -> Gpt:
    """Build the model of a transformers configuration, with weights that make every part matter."""
    shape = shape_from_hf(config.to_diff_dict())  # the content of config.json
    d_model = shape["d_model"]
    shape.setdefault("d_head", d_model // shape["n_heads"])
    shape.setdefault("d_ff", 4 * d_model)
    rows = shape["n_tokens"]  # transformers has no padding
    model = Gpt(ModelConfig(**{**shape, "vocab_rows": rows, **more})).eval()
    init_weights(model, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # gains other than 1, biases other than 0
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter *= 8 if "query" in name else 2
    return model


def assert_same_logits(ours: Gpt, theirs: torch.nn.Module) -> None:
    tokens = torch.randint(0, 99, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        torch.testing.assert_close(ours(tokens, causal=True), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1


def compare_with_llama(config: Any, build_theirs: Callable[[Any], torch.nn.Module]) -> Gpt:
    """Compare with a model that has the names of Llama, and return ours."""
    ours, theirs = build_model(config), build_theirs(config)
    theirs.load_state_dict({"lm_head.weight": ours.head_weight, **rename_weights(ours, LLAMA_NAMES)})
    assert_same_logits(ours, theirs)
    return ours


@pytest.mark.parametrize(
    ("n_kv_heads", "tied", "biases"), [(1, True, False), (2, False, True), (6, False, False)]
)
def test_grouped_heads_biases_and_a_head_match_llama(n_kv_heads: int, tied: bool, biases: bool) -> None:
    config = transformers.LlamaConfig(
        **SMALL, hidden_size=48, num_attention_heads=6, num_key_value_heads=n_kv_heads,
        tie_word_embeddings=tied, attention_bias=biases, mlp_bias=biases, attn_implementation="eager",
    )  # fmt: skip
    compare_with_llama(config, transformers.LlamaForCausalLM)


def test_norms_of_queries_and_keys_match_qwen3() -> None:
    config = transformers.Qwen3Config(
        **SMALL, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        attn_implementation="eager",
    )  # fmt: skip
    assert compare_with_llama(config, transformers.Qwen3ForCausalLM).config.rope_theta == 5e5


def test_layer_norm_gelu_learned_positions_and_biases_match_gpt2() -> None:
    config = transformers.GPT2Config(
        n_embd=48, n_head=4, n_layer=2, vocab_size=99, n_positions=40, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_implementation="eager",
    )  # fmt: skip
    ours = build_model(config)
    state = {}
    for name, tensor in rename_weights(ours, GPT2_NAMES).items():
        name = name.replace("model.norm", "transformer.ln_f")
        # GPT-2 stores matrices of blocks [in, out]
        state[name] = tensor.T if ".h." in name and tensor.ndim == 2 else tensor
    for i in range(2):
        for kind in ("weight", "bias"):
            names = [f"transformer.h.{i}.attention.{part}.{kind}" for part in ("query", "key", "value")]
            state[f"transformer.h.{i}.attn.c_attn.{kind}"] = torch.cat([state.pop(n) for n in names], dim=-1)
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.load_state_dict({"lm_head.weight": ours.head_weight, **state})
    assert_same_logits(ours, theirs)


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
