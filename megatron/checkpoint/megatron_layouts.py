"""Checkpoints of Megatron-LM and Megatron-DeepSpeed: shards of tensor and pipeline ranks, made one.

    iter_0000100/mp_rank_TT/model_optim_rng.pt            Megatron-LM, tensor rank TT
    iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt        ... and pipeline rank PPP
    global_step100/mp_rank_TT_model_states.pt             Megatron-DeepSpeed without pipeline
    global_step100/layer_LL-model_TT-model_states.pt      ... with its pipeline, a file a layer

Settings are in `args` of the rank files. Megatron-LM has two families of names, legacy and core; both are
read (megatron_names.py). Sharded matrices: rows of the embedding, of query_key_value and of the first
feed-forward matrix lie on tensor ranks in order, columns of the two that join the residual likewise; norms
are on every rank. Rows of query_key_value are, for each head of keys: its query heads, the key, the value.
Rows of a gated first matrix are on each rank the gate's share, then the other's.
"""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.foreign_pickle import read_foreign
from megatron.checkpoint.megatron_args import (
    MASKED_DIFFUSION,
    check_args,
    count_tokens,
    place_mask_row,
    rate_min_of,
    read_objective,
)
from megatron.checkpoint.megatron_names import UNKNOWN, ours_of_block, ours_outside, plain_names
from megatron.checkpoint.redundant import check_inverse_frequencies
from megatron.checkpoint.weights import Weights
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import is_finite
from megatron.log import get_logger

log = get_logger(__name__)

NEWEST = {"latest_checkpointed_iteration.txt": "iter_{:0>7}", "latest": "{}"}
RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
IN_FOLDER = ("model_optim_rng.pt", "model_rng.pt")  # the second with a distributed optimizer
Shards = dict[int, dict[str, Tensor]]  # tensor rank -> its tensors under plain names


def is_megatron(folder: Path) -> bool:
    """Whether a folder, or the newest step in it, looks like either layout."""
    return any(True for _ in _rank_paths(_step_folder(folder)))


def read_megatron(folder: Path, n_tokens: int | None = None, objective: str | None = None) -> Weights:
    """The weights of a checkpoint, or of the newest step in a folder of them, as float32.

    `n_tokens` says how many rows of the padded vocabulary are ids; by itself what args.vocab_size says, else
    all. `objective` is what it was trained for, where its args do not say.
    Raises FileNotFoundError, or ValueError for shards that do not fit one another, for models that this one
    cannot be, and where the objective is not known.
    """
    step = _step_folder(folder)
    args, shards = _read_shards(step)
    check_args(args, step)
    objective = read_objective(args, objective, step)
    if unknown := sorted(name for shard in shards.values() for name in shard if name.startswith(UNKNOWN)):
        raise ValueError(f"{step}: holds {unknown[0].removeprefix(UNKNOWN)}, which this model has not")
    try:
        merged = {
            name: _merge(name, [shards[rank][name] for rank in sorted(shards)], args) for name in shards[0]
        }
    except KeyError as error:
        raise ValueError(
            f"{step}: tensor rank 0 has {error}, another rank has not; a file is missing"
        ) from error
    if "word_embeddings.weight" not in merged:
        raise ValueError(f"{step}: holds no word_embeddings.weight; not a language model of Megatron")
    ids = count_tokens(args, n_tokens, len(merged["word_embeddings.weight"]), objective, step)
    if objective == MASKED_DIFFUSION:
        place_mask_row(args, merged, ids, step)
        log.info("%s: masked diffusion, row %d of the embedding is [MASK]", step, ids)
    config = _config_of(args, merged, ids, step)
    state: dict[str, Tensor] = {}
    for name, tensor in merged.items():
        if name.endswith("inv_freq"):
            check_inverse_frequencies(f"{step}: {name}", tensor, config.d_head, config.rope_theta)
            continue
        block = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if block is None:
            state |= ours_outside(name, tensor)
        else:
            found = ours_of_block(block[2], tensor, config)
            state |= {f"blocks.{block[1]}.{ours}": of for ours, of in found.items()}
    weights = Weights(
        config=config,
        objective=objective,
        rate_min=rate_min_of(args, objective),
        state={name: of.float().contiguous() for name, of in state.items()},
        seq_len=getattr(args, "seq_length", None),
        source=str(step),
    )
    weights.model()  # ValueError where a tensor is missing or has another shape
    return weights


def _step_folder(folder: Path) -> Path:
    """The folder itself, or the newest step that it says it has."""
    for name, form in NEWEST.items():
        if (folder / name).is_file():
            told = (folder / name).read_text().strip()
            inner = folder / (told if told == "release" else form.format(told))
            if inner.is_dir():
                return inner
    return folder


def _rank_paths(step: Path) -> Iterator[Path]:
    """Folders or files of ranks."""
    if step.is_dir():
        for path in sorted(step.iterdir()):
            if RANK_FOLDER.fullmatch(path.name) or RANK_FILE.fullmatch(path.name):
                yield path


def _read_shards(step: Path) -> tuple[Namespace, Shards]:
    """Settings, and each tensor rank's tensors, blocks numbered through all pipeline ranks."""
    paths = list(_rank_paths(step))
    if not paths:
        raise FileNotFoundError(f"{step}: holds no mp_rank_*; wanted a checkpoint of Megatron")
    if any(LAYER_FILE.fullmatch(path.name) for path in step.iterdir()):
        return _args_of(read_foreign(paths[0]), paths[0]), _read_layer_files(step)
    parts: dict[tuple[int, int], Any] = {}
    for i, path in enumerate(paths):
        log.info("reading %s (%d of %d)", path, i + 1, len(paths))
        match = RANK_FOLDER.fullmatch(path.name) or RANK_FILE.fullmatch(path.name)
        assert match is not None, "these are the paths that matched"
        file = next((path / name for name in IN_FOLDER if (path / name).is_file()), path / IN_FOLDER[0])
        pipeline_rank = int(match[2] or 0) if path.is_dir() else 0
        parts[int(match[1]), pipeline_rank] = read_foreign(file if path.is_dir() else path)
    n_tensor = 1 + max(tensor for tensor, _ in parts)
    n_pipeline = 1 + max(pipeline for _, pipeline in parts)
    if len(parts) != n_tensor * n_pipeline:
        raise ValueError(
            f"{step}: {len(parts)} ranks' files, wanted {n_tensor} x {n_pipeline}; one is missing"
        )
    args = _args_of(parts[0, 0], paths[0])
    version = parts[0, 0].get("checkpoint_version", 3.0)
    if not is_finite(version):
        raise ValueError(f"{step}: checkpoint_version: got {str(version)[:40]!r}, expected a number")
    if version < 2.0:
        raise ValueError(
            f"{step}: checkpoint_version under 2 orders query, key and value otherwise; not read"
        )
    shards: Shards = {}
    for tensor_rank in range(n_tensor):
        stages = [parts[tensor_rank, pipeline_rank] for pipeline_rank in range(n_pipeline)]
        stages = [_table_in(stage, "module", step) for stage in stages]
        shards[tensor_rank] = _join_stages(stages, step)
    return args, shards


def _join_stages(stages: list[dict[str, Any]], step: Path) -> dict[str, Tensor]:
    """One tensor rank's pipeline stages; interleaved ones (model0, model1, ...) take turns."""
    if "model0" in stages[0]:
        n_chunks = sum(bool(re.fullmatch(r"model\d+", str(key))) for key in stages[0])
        chunks = [_table_in(stage, f"model{i}", step) for i in range(n_chunks) for stage in stages]
    else:
        chunks = [_table_in(stage, "model", step) for stage in stages]
    joined: dict[str, Tensor] = {}
    n_before = 0
    for chunk in chunks:
        held = plain_names(chunk)
        blocks = {int(name.split(".")[1]) for name in held if name.startswith("layers.")}
        for name, tensor in held.items():
            if name.startswith("layers."):
                _, number, rest = name.split(".", 2)
                name = f"layers.{int(number) + n_before}.{rest}"
            _put(joined, name, tensor, step)  # the last stage has the embedding again, as its head
        n_before += len(blocks)
    if "word_embeddings.weight" not in joined:
        raise ValueError(f"{step}: holds no word_embeddings.weight; not a language model of Megatron")
    return joined


def _table_in(part: Any, key: str, step: Path) -> dict[str, Any]:
    """What is under a key of a part, the part itself where it has none. ValueError for no dictionary."""
    table = part.get(key, part) if isinstance(part, dict) else part
    if not isinstance(table, dict):
        raise ValueError(f"{step}: {key}: got {type(table).__name__}, expected tensors by name")
    return table


def _read_layer_files(step: Path) -> Shards:
    """Megatron-DeepSpeed's pipeline: what a file holds tells which layer it is, the numbers their order."""
    shards: Shards = {}
    paths = sorted((int(m[1]), int(m[2]), p) for p in step.iterdir() if (m := LAYER_FILE.fullmatch(p.name)))
    for number, (_, tensor_rank, path) in enumerate(paths):
        log.info("reading %s (%d of %d)", path, number + 1, len(paths))
        held, shard = read_foreign(path), shards.setdefault(tensor_rank, {})
        if any(name.startswith("self_attention.") for name in held):
            n_before = len({name.split(".")[1] for name in shard if name.startswith("layers.")})
            shard |= plain_names({f"layers.{n_before}.{name}": tensor for name, tensor in held.items()})
        elif set(held) <= {"weight", "bias"}:
            shard |= {f"final_norm.{name}": tensor for name, tensor in held.items()}
        else:  # the embedding, which stands again at the end where it is the head, or a head
            named = {name.replace("lm_head.", "output_layer."): tensor for name, tensor in held.items()}
            for name, tensor in plain_names(named).items():
                _put(shard, name, tensor, step)
    return shards


def _put(shard: dict[str, Tensor], name: str, tensor: Tensor, step: Path) -> None:
    """Add a tensor. ValueError where another one has its name."""
    if name in shard and not torch.equal(shard[name], tensor):
        raise ValueError(f"{step}: {name} is there twice and differs; its pipeline stages are of two models")
    shard[name] = tensor


def _args_of(part: dict[str, Any], path: Path) -> Namespace:
    args = part.get("args") if isinstance(part, dict) else None
    if not isinstance(args, Namespace) or not hasattr(args, "num_attention_heads"):
        raise ValueError(
            f"{path}: holds no args, which say how many heads there are; not a checkpoint of Megatron"
        )
    return args


def _merge(name: str, parts: list[Tensor], args: Namespace) -> Tensor:
    """One tensor from those of all tensor ranks. ValueError where their shapes do not fit."""
    is_matrix = name.endswith(".weight") and "norm" not in name
    are_columns = name.endswith(("self_attention.out.weight", "mlp.second.weight"))
    is_gated = name.endswith(("mlp.first.weight", "mlp.first.bias")) and getattr(args, "swiglu", False)
    if name.startswith(("layers.", "word_embeddings", "output_layer", "position_embeddings")) and (
        any(part.ndim != 1 + is_matrix for part in parts)
        or len({part.shape[:1] if are_columns else part.shape[1:] for part in parts}) > 1
        or (is_gated and any(len(part) % 2 for part in parts))
    ):
        shapes = ", ".join(str(list(part.shape)) for part in parts[:8])
        raise ValueError(f"{name}: got shapes {shapes} on the tensor ranks, expected equal parts of a tensor")
    if are_columns:
        return torch.cat(parts, dim=1)
    if is_gated:
        gates, others = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *others])
    if ".qkv." in name or ".first." in name or name in ("word_embeddings.weight", "output_layer.weight"):
        return torch.cat(parts)
    for part in parts[1:]:
        if not torch.equal(part, parts[0]):
            raise ValueError(f"{name}: differs between tensor ranks, which must all have the same")
    return parts[0]


def _config_of(args: Namespace, merged: dict[str, Tensor], n_tokens: int, step: Path) -> ModelConfig:
    """The shape that args tell. ValueError for what this model cannot be."""

    def told(name: str, default: Any) -> Any:
        value = getattr(args, name, None)
        return default if value is None else value

    if "layers.0.mlp.second.weight" not in merged:
        raise ValueError(f"{step}: its first layer holds no MLP; not a transformer of Megatron's")
    rows, d_model = merged["word_embeddings.weight"].shape
    n_heads, swiglu = args.num_attention_heads, told("swiglu", False)
    rotary = told("position_embedding_type", "learned_absolute") == "rope" or told(
        "use_rotary_position_embeddings", False
    )
    groups = told("num_query_groups", n_heads) if told("group_query_attention", False) else n_heads
    positions = merged.get("position_embeddings.weight")
    return ModelConfig(
        d_model=d_model,
        d_ff=merged["layers.0.mlp.second.weight"].shape[1],
        d_head=told("kv_channels", d_model // n_heads),
        n_heads=n_heads,
        n_kv_heads=min(groups, told("num_key_value_heads", groups)),
        n_layers=len({name.split(".")[1] for name in merged if name.startswith("layers.")}),
        n_tokens=n_tokens,
        vocab_rows=rows,
        rope_theta=float(told("rotary_base", told("rope_theta", 10000.0))),
        norm_eps=told("norm_epsilon", told("layernorm_epsilon", 1e-5)),
        norm="rmsnorm" if told("normalization", "LayerNorm").lower() == "rmsnorm" else "layernorm",
        feed_forward="swiglu" if swiglu else "gelu",
        positions="rotary" if rotary else "learned",
        n_positions=None if positions is None else len(positions),
        biases=told("add_bias_linear", True),
        tied_embedding="output_layer.weight" not in merged,
        qk_norm="layers.0.q_norm.weight" in merged,
    )
