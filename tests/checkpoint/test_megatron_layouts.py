"""Megatron checkpoints, sharded here rank by rank as in Megatron's layers, are merged into one model."""

import enum
import itertools
import re
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.convert.megatron_layouts import read_megatron
from megatron.model.transformer import Gpt
from tests.conftest import build_tiny
from tests.wrong_values import read_refusal

Tensors = dict[str, Tensor]
LLAMA = {"n_layers": 4, "n_tokens": 41, "n_kv_heads": 2, "vocab_rows": 48}
UNTIED = {**LLAMA, "tied_embedding": False, "qk_norm": True}
GPT2 = {
    "n_layers": 4, "n_tokens": 41, "n_kv_heads": 4, "vocab_rows": 48, "norm": "layernorm",
    "feed_forward": "gelu", "positions": "learned", "n_positions": 16, "biases": True,
}  # fmt: skip


def share(tensor: Tensor, rank: int, n_ranks: int, dim: int = 0) -> Tensor:
    return tensor.chunk(n_ranks, dim)[rank].clone()


def shard_qkv(model: Gpt, layer: int, rank: int, n_ranks: int, kind: str) -> Tensor:
    """Return a rank's rows of query_key_value: for each key head its queries, the key, the value."""
    attention, n_groups = model.blocks[layer].attention, model.config.kv_heads
    parts = (getattr(getattr(attention, name), kind) for name in ("query", "key", "value"))
    groups = zip(*(part.chunk(n_groups) for part in parts), strict=True)
    return share(torch.cat([torch.cat(group) for group in groups]), rank, n_ranks)


def shard_layer(model: Gpt, layer: int, rank: int, n: int) -> Tensors:
    """Return one layer's tensors on one tensor rank, under the legacy names."""
    block = model.blocks[layer]
    first = [block.mlp.up] if block.mlp.gate is None else [block.mlp.gate, block.mlp.up]
    tensors = {}
    for kind in ("weight", "bias") if model.config.biases else ("weight",):
        tensors[f"input_layernorm.{kind}"] = getattr(block.attention_norm, kind)
        tensors[f"self_attention.query_key_value.{kind}"] = shard_qkv(model, layer, rank, n, kind)
        tensors[f"post_attention_layernorm.{kind}"] = getattr(block.mlp_norm, kind)
        tensors[f"mlp.dense_h_to_4h.{kind}"] = torch.cat([share(getattr(m, kind), rank, n) for m in first])
    tensors["self_attention.dense.weight"] = share(block.attention.out.weight, rank, n, dim=1)
    tensors["mlp.dense_4h_to_h.weight"] = share(block.mlp.down.weight, rank, n, dim=1)
    if model.config.biases:
        tensors["self_attention.dense.bias"] = block.attention.out.bias
        tensors["mlp.dense_4h_to_h.bias"] = block.mlp.down.bias
    if model.config.qk_norm:
        tensors["self_attention.q_layernorm.weight"] = block.attention.query_norm.weight
        tensors["self_attention.k_layernorm.weight"] = block.attention.key_norm.weight
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def shard_outside(model: Gpt, rank: int, n: int) -> Tensors:
    """Return the tensors outside of the layers on one tensor rank, under the names of Megatron core."""
    tensors = {"embedding.word_embeddings.weight": share(model.embedding.weight, rank, n)}
    if model.position_embedding is not None:
        tensors["embedding.position_embeddings.weight"] = model.position_embedding.weight
    tensors |= {f"decoder.final_layernorm.{kind}": of for kind, of in model.norm.named_parameters()}
    if model.unembedding is not None:
        tensors["output_layer.weight"] = share(model.unembedding.weight, rank, n)
    return tensors


def nest(tensors: Tensors) -> dict[str, Any]:
    """Nest tensors as the legacy layout does: `encoder` has flat names, other parts have a level per word."""
    nested: dict[str, Any] = {}
    for name, tensor in tensors.items():
        part, *words = name.replace("decoder.", "encoder.").split(".", 1 if "decoder." in name else -1)
        level = nested.setdefault(part, {})
        for word in words[:-1]:
            level = level.setdefault(word, {})
        level[words[-1]] = tensor
    return {"language_model": nested}


def to_core_name(name: str, engine: bool) -> str:
    """Convert a legacy name to Megatron core's, with or without Transformer Engine."""
    for old, new in (
        ("self_attention.query_key_value", "self_attention.linear_qkv"),
        ("self_attention.dense", "self_attention.linear_proj"),
        ("mlp.dense_h_to_4h", "mlp.linear_fc1"),
        ("mlp.dense_4h_to_h", "mlp.linear_fc2"),
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_" if engine else "input_layernorm."),
        ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_" if engine else "pre_mlp_layernorm."),
    ):
        name = name.replace(old, new)
    return name


def make_args(model: Gpt) -> Namespace:
    """Return args as Megatron pickles them, with an enum of a module that is not importable."""
    config = model.config
    module = types.ModuleType("absent_megatron")
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module="absent_megatron")
    module.ModelType = kind
    sys.modules["absent_megatron"] = module
    return Namespace(
        num_layers=config.n_layers, hidden_size=config.d_model, num_attention_heads=config.n_heads,
        group_query_attention=config.kv_heads != config.n_heads, num_query_groups=config.kv_heads,
        kv_channels=config.d_head, swiglu=config.feed_forward == "swiglu", seq_length=16,
        vocab_size=config.n_tokens, padded_vocab_size=config.vocab_rows,
        add_bias_linear=config.biases, norm_epsilon=config.norm_eps, add_qkv_bias=config.qkv_biases,
        untie_embeddings_and_output_weights=model.unembedding is not None, qk_layernorm=config.qk_norm,
        normalization="RMSNorm" if config.norm == "rmsnorm" else "LayerNorm", rotary_percent=1.0,
        position_embedding_type="rope" if config.positions == "rotary" else "learned_absolute",
        rotary_base=10000, params_dtype=torch.bfloat16, model_type=kind.encoder_or_decoder, num_experts=None,
    )  # fmt: skip


def write_megatron_lm(model: Gpt, folder: Path, n_tensor: int, n_pipeline: int, names: str) -> None:
    """Write iter_0000007 with one folder per rank."""
    (folder / "iter_0000007").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
    per_stage = model.config.n_layers // n_pipeline
    for rank, stage in itertools.product(range(n_tensor), range(n_pipeline)):
        is_last = stage == n_pipeline - 1
        outside = shard_outside(model, rank, n_tensor)
        tensors = {
            name: of
            for name, of in outside.items()
            if (stage == 0 if name.startswith("embedding.") else is_last)
        }
        for i in range(per_stage):
            layer = shard_layer(model, stage * per_stage + i, rank, n_tensor)
            tensors |= {f"decoder.layers.{i}.{name}": of for name, of in layer.items()}
        state: dict[str, Any]
        if names == "legacy":
            state = nest(tensors)
            if is_last and stage > 0 and model.unembedding is None:
                head = outside["embedding.word_embeddings.weight"]
                state["word_embeddings_for_head"] = {"weight": head}
        else:
            state = {to_core_name(name, engine=names == "engine"): of for name, of in tensors.items()}
            state["decoder.layers.0.self_attention.core_attention._extra_state"] = None
        place = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if n_pipeline > 1 else "")
        (folder / "iter_0000007" / place).mkdir()
        checkpoint = {"model": state, "args": make_args(model), "iteration": 7, "checkpoint_version": 3.0}
        torch.save(checkpoint, folder / "iter_0000007" / place / "model_optim_rng.pt")


def write_deepspeed(model: Gpt, folder: Path, n_tensor: int, pipeline: bool) -> None:
    """Write global_step7 with one file per tensor rank, or per layer and rank."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    args = make_args(model)
    args.num_key_value_heads, args.group_query_attention = model.config.kv_heads, False
    for rank in range(n_tensor):
        layers = [shard_layer(model, i, rank, n_tensor) for i in range(model.config.n_layers)]
        outside = shard_outside(model, rank, n_tensor)
        module = None
        if pipeline:
            embedding = {"word_embeddings.weight": outside["embedding.word_embeddings.weight"]}
            files = {1: embedding, len(layers) + 4: {"weight": model.norm.weight}}
            files |= {3 + i: layer for i, layer in enumerate(layers)}
            if model.unembedding is not None:
                files[len(layers) + 5] = {"lm_head.weight": outside["output_layer.weight"]}
            for number, tensors in files.items():
                torch.save(tensors, step / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        else:
            for i, layer in enumerate(layers):
                outside |= {f"decoder.layers.{i}.{name}": of for name, of in layer.items()}
            module = nest(outside)
        torch.save({"module": module, "args": args}, step / f"mp_rank_{rank:02d}_model_states.pt")


def assert_same(model: Gpt, folder: Path) -> None:
    weights = read_any(folder)
    theirs, ours = weights.state, model.state_dict()
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor), name
    assert weights.config == model.config
    tokens = torch.arange(16)[None] % model.config.n_tokens
    assert torch.equal(weights.build_model()(tokens, causal=True), model(tokens, causal=True))


@pytest.mark.parametrize(
    ("names", "ranks", "shape"),
    [
        *((names, (2, 2), shape) for names in ("legacy", "core") for shape in (LLAMA, UNTIED, GPT2)),
        ("core", (1, 1), LLAMA),
        ("engine", (1, 4), UNTIED),
        ("legacy", (2, 1), GPT2),
    ],
)
def test_ranks_of_megatron_lm_are_merged_bitwise_exactly(
    tmp_path: Path, names: str, ranks: tuple[int, int], shape: dict[str, Any]
) -> None:
    model = build_tiny(**shape)
    write_megatron_lm(model, tmp_path / "ck", *ranks, names)
    assert_same(model, tmp_path / "ck")
    assert_same(model, tmp_path / "ck" / "iter_0000007")


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("n_tensor", [1, 2])
def test_ranks_of_megatron_deepspeed_are_merged_bitwise_exactly(
    tmp_path: Path, pipeline: bool, n_tensor: int
) -> None:
    model = build_tiny(**LLAMA)
    write_deepspeed(model, tmp_path / "ck", n_tensor, pipeline)
    assert_same(model, tmp_path / "ck")
    if pipeline:
        untied = build_tiny(**UNTIED | {"qk_norm": False})
        write_deepspeed(untied, tmp_path / "untied", n_tensor, True)
        assert_same(untied, tmp_path / "untied")


def test_inconsistent_shards_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model = build_tiny(**LLAMA)
    write_megatron_lm(model, tmp_path / "ck", 2, 2, "core")
    step = tmp_path / "ck" / "iter_0000007"
    lost = step / "mp_rank_01_001" / "model_optim_rng.pt"
    saved = torch.load(lost, weights_only=False)

    def refused(sentence: str, **changes: Any) -> None:
        torch.save({**saved, **changes}, lost)
        assert sentence in str(read_refusal(lambda: read_megatron(tmp_path / "ck")))

    other = {name: None if of is None else of + 1 for name, of in saved["model"].items()}
    refused("differs between tensor ranks", model=other)
    fewer = dict(list(saved["model"].items())[3:])
    refused("another rank does not", model=fewer)
    lost.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read as a torch file"):
        read_megatron(tmp_path / "ck")
    lost.unlink()
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_megatron(tmp_path / "ck")
    lost.parent.rmdir()
    with pytest.raises(ValueError, match="got files of 3 ranks, expected 2 x 2"):
        read_megatron(tmp_path / "ck")


def without(part: str) -> Callable[[dict[str, Any]], None]:
    """Return a change that removes the tensors whose names contain `part`."""

    def remove(checkpoint: dict[str, Any]) -> None:
        tensors = checkpoint["model"]
        checkpoint["model"] = {name: tensor for name, tensor in tensors.items() if part not in name}

    return remove


def with_args(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda checkpoint: vars(checkpoint["args"]).update(changes)


def with_part(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda checkpoint: checkpoint.update({key: value})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (without("word_embeddings"), "got no word_embeddings"),
        (without("linear_fc2"), "got no MLP"),
        (with_args(position_embedding_type="learned_absolute"), "learned positions without n_positions"),
        (with_args(num_attention_heads="2"), "args.num_attention_heads: got '2'"),
        (with_args(num_attention_heads=0), "args.num_attention_heads: got '0'"),
        (with_args(num_attention_heads=3), "iter_0000007"),
        (with_args(kv_channels=1 << 40), "args.kv_channels"),
        (with_args(rotary_base="x"), "args.rotary_base: got 'x'"),
        (with_args(norm_epsilon=float("nan")), "args.norm_epsilon"),
        (with_args(normalization=5), "got normalization 5"),
        (with_args(swiglu="yes"), "args.swiglu: got 'yes'"),
        (with_args(seq_length=[]), "args.seq_length"),
        (with_args(num_query_groups=3), "iter_0000007"),
        (with_args(squared_relu=True), "trained with squared_relu"),
        (with_args(use_rope_scaling=True, rotary_seq_len_interpolation_factor=2), "got two scalings of"),
        (with_args(window_size=(64, 64)), "got window_size .64, 64., expected .positions before, 0."),
        (with_args(rotary_percent=0.4), "got rotary_percent 0.4 of 8"),
        (with_args(use_target_position_embeddings=True), "trained with use_target_position_embeddings"),
        (with_args(position_embedding_type="relative"), "position_embedding_type relative, expected rope or"),
        (with_args(num_experts=[4]), r"got num_experts \[4\], expected none"),
        (with_args(swiglu=False, bias_gelu_fusion=False), "linear_fc1.weight: got 128 rows, expected 64"),
        (with_part("model", 5), "iter_0000007"),
        (with_part("model", {"x": {1: torch.zeros(2)}}), "iter_0000007"),
        (with_part("model", "x"), "iter_0000007"),
        (with_part("module", False), "iter_0000007"),
        (with_part("checkpoint_version", "3"), "got checkpoint_version 3"),
        (with_part("checkpoint_version", 1.0), "got checkpoint_version 1.0, expected 2 or more"),
        (with_part("model0", 1.5), "iter_0000007"),
    ],
)
def test_content_of_a_wrong_kind_is_refused_in_one_sentence(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    write_megatron_lm(build_tiny(**LLAMA), tmp_path, 1, 1, "core")
    path = tmp_path / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    checkpoint = torch.load(path, weights_only=False)
    vars(checkpoint["args"])[None] = 5  # a name that is not a string is ignored
    torch.save(checkpoint, path)
    assert read_megatron(tmp_path).config.n_heads == 4
    change(checkpoint)
    torch.save(checkpoint, path)
    assert re.search(sentence, str(read_refusal(lambda: read_megatron(tmp_path))))


def test_a_universal_checkpoint_is_refused_with_its_replacement(tmp_path: Path) -> None:
    write_deepspeed(build_tiny(**LLAMA), tmp_path, 1, False)
    (tmp_path / "global_step7" / "zero").mkdir()
    with pytest.raises(ValueError, match="Convert the global_step folder that it was made from"):
        read_megatron(tmp_path)
