"""N, counted from the shape, equals the number of parameters of the built model."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.presets import load_model_sizes
from megatron.config.schema import ModelConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.plan.count import flops_per_token, n_non_embedding, n_params
from megatron.plan.resolve import resolve_config


def test_the_count_of_every_size_is_that_of_the_built_model() -> None:
    for i, size in enumerate(load_model_sizes()):
        raw = {"model": {"size": size, "n_tokens": 50257}, "lr_scheduler": {"total_iterations": 1}}
        model = resolve_config(raw).model
        # all layers of some sizes, and two of the others
        model = model if i % 8 == 0 else replace(model, n_layers=2)
        with torch.device("meta"):
            built = Gpt(model)
        assert n_params(model) == sum(parameter.numel() for parameter in built.parameters()), size


def test_the_ladder_is_the_published_one_with_swiglu_width(scaling_data: Path) -> None:
    with (scaling_data / "model_sizes.csv").open() as file:
        published = {row["name"]: row for row in csv.DictReader(file)}
    assert list(load_model_sizes()) == list(published)
    for name, row in published.items():
        ours = load_model_sizes()[name]
        d_model = int(row["d_model"])
        assert ours["d_model"] == d_model
        assert ours["d_ff"] == 8 * d_model // 3 // 64 * 64
        assert (ours["d_head"], ours["n_heads"]) == (int(row["kv_size"]), int(row["n_heads"]))
        assert ours["n_layers"] == int(row["n_layers"])


SHAPE_OPTIONS = {
    "default": {}, "grouped": {"n_kv_heads": 2}, "untied": {"tied_embedding": False},
    "biases": {"biases": True}, "layernorm": {"norm": "layernorm"}, "qk_norm": {"qk_norm": True},
    "gpt2": {
        "norm": "layernorm", "feed_forward": "gelu", "biases": True,
        "positions": "learned", "n_positions": 11,
    },
    "qkv_biases": {"qkv_biases": True, "n_kv_heads": 2},
    "olmo2": {"qk_norm": True, "qk_norm_all_heads": True, "norm_placement": "output", "n_kv_heads": 2},
    "pythia": {
        "norm": "layernorm", "feed_forward": "gelu_exact", "biases": True, "parallel_residual": True,
        "rotary_dims": 2, "tied_embedding": False,
    },
    "head_bias": {"tied_embedding": False, "head_bias": True},
    "all": {
        "norm": "layernorm", "positions": "learned", "n_positions": 11, "biases": True, "n_kv_heads": 1,
        "tied_embedding": False, "qk_norm": True, "parametrization": "completep", "base_d_model": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPE_OPTIONS)
def test_every_option_of_the_shape_is_counted(name: str) -> None:
    model = ModelConfig(
        d_model=24, d_ff=40, d_head=6, n_heads=4, n_layers=3, n_tokens=100, vocab_rows=128,
        **SHAPE_OPTIONS[name],
    )  # fmt: skip
    init_weights(built := Gpt(model), seed=0)
    assert n_params(model) == sum(parameter.numel() for parameter in built.parameters())
    outside = ("embedding", "unembedding")  # token and position embeddings, and the head
    inside = [p.numel() for name, p in built.named_parameters() if not name.split(".")[0].endswith(outside)]
    assert n_non_embedding(model) == sum(inside)
    # independent count: torch counts the matrix products of a forward
    # (MATH, because it does not count those inside its fused attention on a CPU)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        built(torch.zeros(2, 11, dtype=torch.long), causal=False)
    assert 3 * counter.get_total_flops() == flops_per_token(model, seq_len=11) * 22
