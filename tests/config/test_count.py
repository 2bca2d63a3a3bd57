"""N is counted from the shape; the built model must agree."""

import csv
from pathlib import Path

import pytest
import torch

from megatron.config.count import flop_terms, flops_per_token, flops_per_token_mfu, n_params
from megatron.config.presets import model_sizes, padded_rows
from megatron.config.read import build_config
from megatron.config.schema import ModelConfig
from megatron.model.gpt import Gpt


def shape(size: str, n_tokens: int = 50257) -> ModelConfig:
    return build_config(
        {"model": {"size": size, "n_tokens": n_tokens}, "lr_scheduler": {"total_iterations": 1}}
    ).model


@pytest.mark.parametrize("size", model_sizes())
def test_the_count_of_every_size_is_that_of_the_built_model(size: str) -> None:
    with torch.device("meta"):
        model = Gpt(shape(size))
    assert n_params(shape(size)) == sum(parameter.numel() for parameter in model.parameters())


def test_the_ladder_is_the_published_one_with_swiglu_width(scaling_data: Path) -> None:
    with (scaling_data / "model_sizes.csv").open() as file:
        published = {row["name"]: row for row in csv.DictReader(file)}
    assert list(model_sizes()) == list(published)
    for name, row in published.items():
        ours = model_sizes()[name]
        d_model = int(row["d_model"])
        assert ours["d_model"] == d_model
        assert ours["d_ff"] == 8 * d_model // 3 // 64 * 64
        assert (ours["d_head"], ours["n_heads"]) == (int(row["kv_size"]), int(row["n_heads"]))
        assert ours["n_layers"] == int(row["n_layers"])


def test_the_embedding_holds_the_tokens_mask_and_padding_to_128() -> None:
    assert padded_rows(50257) == 50304
    assert padded_rows(127) == 128
    assert padded_rows(128) == 256


def test_flops_by_hand_for_a_small_model() -> None:
    model = ModelConfig(d_model=8, d_ff=16, d_head=4, n_heads=2, n_layers=3, n_tokens=100, vocab_rows=128)
    # forward multiplies and adds: q k v out 4*8*8, feed-forward 3*8*16, head 8*128; scores and mix S*8 each
    forward = 2 * (3 * (4 * 64 + 3 * 128 + 2 * 10 * 8) + 1024)
    assert flops_per_token(model, seq_len=10) == 3 * forward
    assert set(flop_terms(model, 10)) == {"attention", "attention_scores", "feed_forward", "head"}


def test_mfu_formula_gives_the_published_flops_of_llama_3_8b() -> None:
    # torchtitan counts 57.914 GFLOP a token at 8192 positions. Llama-3 8B has grouped-query attention and an
    # untied head, so its N without the embedding is put in by hand; the attention term is our formula's.
    n_without_embedding = 7_504_924_672
    llama = ModelConfig(
        d_model=4096, d_ff=14336, d_head=128, n_heads=32, n_layers=32, n_tokens=128255, vocab_rows=128256
    )
    attention = flops_per_token_mfu(llama, 8192) - 6 * n_params(llama)
    assert (6 * n_without_embedding + attention) / 1e9 == pytest.approx(57.914, abs=5e-4)
