"""Read checkpoints of Megatron-LM and Megatron-DeepSpeed and merge their tensor and pipeline ranks.

    iter_0000100/mp_rank_TT/model_optim_rng.pt            Megatron-LM, tensor rank TT
    iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt        ... and pipeline rank PPP
    global_step100/mp_rank_TT_model_states.pt             Megatron-DeepSpeed without pipeline
    global_step100/layer_LL-model_TT-model_states.pt      ... with its pipeline, one file per layer

and torch_dist folders of Megatron core (.metadata, __0_0.distcp, ...; args in
common.pt). There a tensor of a layer is stored as one tensor over all layers,
`decoder.layers.mlp.linear_fc2.weight` [L, D, F], or, of layers that differ,
with the number of the layer.

The settings are in `args` of the rank files. Megatron-LM has two families of
names, legacy and core; both are supported (names.py). Tensor parallelism splits
the rows of the embedding, of query_key_value and of the first MLP matrix over
the tensor ranks in order, and the columns of the two output projections; norms
are on every rank. The rows of query_key_value are, for each key head: its query
heads, the key, the value. The rows of a gated first matrix are, on each rank:
its share of the gate, then its share of the up projection.
"""

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.convert.dcp_folder import read_dcp_tensors
from megatron.checkpoint.convert.megatron_args import (
    EMBEDDING,
    FORK_RATE_MIN,
    MASKED_DIFFUSION,
    build_config,
    check_args,
    count_tokens,
    get_args,
    is_fork,
    move_mask_row,
    read_objective,
)
from megatron.checkpoint.convert.names import (
    MEGATRON,
    count_blocks,
    import_names,
    normalize_megatron_names,
)
from megatron.checkpoint.layout import METADATA
from megatron.checkpoint.model_weights import Weights
from megatron.checkpoint.torch_file import load_torch_file
from megatron.log import get_logger

log = get_logger(__name__)

NEWEST_FILES = {"latest_checkpointed_iteration.txt": "iter_{:0>7}", "latest": "{}"}
# mp_rank_TT or mp_rank_TT_PPP: the numbers of the tensor rank and of
# the pipeline rank; a folder, or DeepSpeed's file of a tensor rank
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+)|(_model_states\.pt))?")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")  # the second name is used with a distributed optimizer
COMMON = "common.pt"  # args in a torch_dist folder
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "rotary_pos_emb.")
# a tensor of all layers: no number after "layers."
STACKED = re.compile(r"(decoder\.layers)\.(?!\d+\.)(.+)")
BLOCK = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_load_file = partial(load_torch_file, map_file=True, inert_classes=True)
RankTensors = dict[int, dict[str, Tensor]]  # tensor rank -> name in Megatron core -> tensor


def is_megatron_checkpoint(folder: Path) -> bool:
    """Return True if a folder, or the newest step in it, has rank files of either layout, or torch_dist's."""
    step = _find_step_folder(folder)
    return _is_torch_dist(step) or bool(_list_ranks(step))


def read_megatron(folder: Path, n_tokens: int | None = None, objective: str | None = None) -> Weights:
    """Load the weights of a checkpoint, or of the newest step in a folder of checkpoints, as float32.

    n_tokens    number of ids among the rows of the padded vocabulary;
                default: args.vocab_size, else all rows
    objective   training objective, if args do not determine it

    Raises FileNotFoundError, or ValueError for inconsistent shards, unsupported
    models and an unknown objective.
    """
    step = _find_step_folder(folder)
    with _name_step(step):
        args, shards = _read_shards(step)
        check_args(args)
        objective = read_objective(args, objective)
        try:
            merged = {
                name: _merge_ranks(name, [shards[rank][name] for rank in sorted(shards)], args)
                for name in shards[0]
            }
        except KeyError as error:
            raise ValueError(
                f"tensor rank 0 has {error}, another rank does not; a file is missing"
            ) from error
        embedding = merged.get(EMBEDDING)
        if embedding is None:
            raise ValueError("got no word_embeddings.weight, expected a Megatron language model")
        ids = count_tokens(args, n_tokens, len(embedding), objective)
        if objective == MASKED_DIFFUSION:
            move_mask_row(args, merged, ids)
            log.info("%s: masked diffusion, row %d of the embedding is [MASK]", step, ids)
        config = build_config(args, merged, ids)
        state = import_names(MEGATRON, merged, config)
    weights = Weights(
        config=config,
        objective=objective,
        rate_min=FORK_RATE_MIN if is_fork(args) and objective == MASKED_DIFFUSION else None,
        state={name: value.float().contiguous() for name, value in state.items()},
        seq_len=getattr(args, "seq_length", None),
        source=str(step),
    )
    weights.build_model()  # raises ValueError for a missing tensor or a wrong shape
    return weights


@contextmanager
def _name_step(step: Path) -> Iterator[None]:
    """Put the folder before the message of a ValueError that does not begin with a path in it."""
    try:
        yield
    # RuntimeError: a tensor in args, which has no truth value
    except (ValueError, RuntimeError) as error:
        raise error if str(error).startswith(str(step)) else ValueError(f"{step}: {error}") from error


def _find_step_folder(folder: Path) -> Path:
    """Return the folder of the newest step named in `folder`, else `folder` itself."""
    for name, form in NEWEST_FILES.items():
        if (folder / name).is_file():
            step_name = (folder / name).read_text().strip()
            # "{:0>7}" pads text: 100 -> iter_0000100. Megatron-LM
            # names converted weights "release" instead of a number.
            inner = folder / (step_name if step_name == "release" else form.format(step_name))
            if inner.is_dir():
                return inner
    return folder


def _is_torch_dist(step: Path) -> bool:
    return (step / METADATA).is_file() and (step / COMMON).is_file()


def _list_ranks(step: Path) -> dict[tuple[int, int], Path]:
    """Return the file of each (tensor rank, pipeline rank)."""
    files = {}
    for path in sorted(step.iterdir()) if step.is_dir() else []:
        if match := RANK.fullmatch(path.name):
            names = [path / name for name in RANK_FILES]
            file = path if match[3] else next((name for name in names if name.is_file()), names[0])
            files[int(match[1]), int(match[2] or 0)] = file
    return files


def _read_shards(step: Path) -> tuple[Namespace, RankTensors]:
    """Return args and each tensor rank's tensors, with blocks numbered across all pipeline ranks."""
    if _is_torch_dist(step):
        return get_args(_load_file(step / COMMON), step / COMMON), {0: _read_torch_dist(step)}
    files = _list_ranks(step)
    if not files:
        raise FileNotFoundError(f"{step}: got no mp_rank_* files, expected a Megatron checkpoint")
    if (step / "zero").is_dir():
        raise ValueError(
            "got a universal checkpoint of DeepSpeed, expected one of Megatron-DeepSpeed. "
            "Convert the global_step folder that it was made from."
        )
    # With DeepSpeed's pipeline, rank files contain args
    # but no tensors; those are in the layer files.
    if any(LAYER_FILE.fullmatch(path.name) for path in step.iterdir()):
        first = next(iter(files.values()))
        return get_args(_load_file(first), first), _read_layer_files(step)
    # Ranks are numbered from 0, so the largest numbers
    # give the sizes; their product detects a missing file.
    n_tensor, n_pipeline = (1 + max(numbers) for numbers in zip(*files, strict=True))
    if len(files) != n_tensor * n_pipeline:
        raise ValueError(
            f"got files of {len(files)} ranks, expected {n_tensor} x {n_pipeline}; a file is missing"
        )
    parts = {}
    for i, (rank, file) in enumerate(files.items()):
        log.info("reading %s (%d of %d)", file, i + 1, len(files))
        parts[rank] = _load_file(file)
    args = get_args(parts[0, 0], files[0, 0])
    # Rows of query_key_value by version, for H
    # heads: 0 is [3, H, K], 1 is [H, K, 3], from
    # 2 on it is [H, 3, K]. All have the same
    # shape, so only the version shows the order.
    version = parts[0, 0].get("checkpoint_version", 3.0)
    if not isinstance(version, (int, float)) or version < 2.0:
        raise ValueError(
            f"got checkpoint_version {version}, expected 2 or more; older ones order QKV differently"
        )
    return args, {
        rank: _join_stages([_get_table(parts[rank, stage], "module") for stage in range(n_pipeline)])
        for rank in range(n_tensor)
    }


def _read_torch_dist(step: Path) -> dict[str, Tensor]:
    """Return the model's tensors, those over all layers cut into one per layer."""
    tensors: dict[str, Tensor] = {}
    # other names belong to the optimizer, or are not tensors
    selected = read_dcp_tensors(step, lambda name: name.startswith(MODEL_KEYS) and "_extra_state" not in name)
    for name, tensor in selected.items():
        match = STACKED.fullmatch(name)
        if match is None:
            tensors[name] = tensor
            continue
        if not tensor.ndim:
            raise ValueError(f"{name}: got a single number, expected one tensor per layer")
        tensors |= {f"{match[1]}.{i}.{match[2]}": layer for i, layer in enumerate(tensor)}
    return normalize_megatron_names(tensors)


def _join_stages(stages: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Merge the pipeline stages of one tensor rank.

    With an interleaved schedule a stage has several chunks (model0, model1,
    ...). The layer order is chunk 0 of all stages, then chunk 1 of all stages,
    and so on.
    """
    # Example: 8 layers, 2 stages, 2 chunks. Stage 0 has layers 0-1 in model0
    # and 4-5 in model1, stage 1 has 2-3 and 6-7. The chunks are therefore
    # joined in the order (0, stage 0), (0, stage 1), (1, stage 0), ...
    n_chunks = sum(bool(re.fullmatch(r"model\d+", str(key))) for key in stages[0])
    rank_tensors: dict[str, Tensor] = {}
    for key in [f"model{i}" for i in range(n_chunks)] or ["model"]:
        for stage in stages:
            # Megatron numbers the layers of every chunk
            # from 0: add the layers of all earlier chunks.
            n_before = count_blocks(rank_tensors)
            for name, tensor in normalize_megatron_names(_get_table(stage, key)).items():
                if match := BLOCK.fullmatch(name):
                    name = f"decoder.layers.{int(match[1]) + n_before}.{match[2]}"
                _add_tensor(rank_tensors, name, tensor)  # the last stage has a copy of a tied embedding
    return rank_tensors


def _get_table(part: Any, key: str) -> dict[str, Any]:
    """Return `part[key]`, or `part` if it lacks the key. Raises ValueError if that is not a dictionary."""
    table = part.get(key, part) if isinstance(part, dict) else part
    if not isinstance(table, dict):
        raise ValueError(f"{key}: got {type(table).__name__}, expected a dictionary of tensors")
    return table


def _read_layer_files(step: Path) -> RankTensors:
    """Read Megatron-DeepSpeed's layer files: names in a file show its layer type, file numbers the order."""
    shards: RankTensors = {}
    # sorted by number, not by name: as text, layer_100 would come before layer_11
    paths = sorted((int(m[1]), int(m[2]), p) for p in step.iterdir() if (m := LAYER_FILE.fullmatch(p.name)))
    for number, (_, tensor_rank, path) in enumerate(paths):
        log.info("reading %s (%d of %d)", path, number + 1, len(paths))
        tensors, shard = _load_file(path), shards.setdefault(tensor_rank, {})
        if any(name.startswith("self_attention.") for name in tensors):
            # File numbers count the embedding and other layers
            # too: number the blocks of each rank in file order.
            place = f"layers.{count_blocks(shard)}."
        else:
            # the norm; else the embedding (a second time at the
            # end if it is tied), or a separate head
            place = "final_layernorm." if set(tensors) <= {"weight", "bias"} else ""
        named = {f"{place}{name.replace('lm_head.', 'output_layer.')}": tensors[name] for name in tensors}
        for name, tensor in normalize_megatron_names(named).items():
            _add_tensor(shard, name, tensor)
    return shards


def _add_tensor(shard: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    """Add a tensor. Raises ValueError if a different tensor has its name."""
    if name in shard and not torch.equal(shard[name], tensor):
        raise ValueError(f"got two different tensors {name}; its pipeline stages are of different models")
    shard[name] = tensor


def _merge_ranks(name: str, parts: list[Tensor], args: Namespace) -> Tensor:
    """Merge the shards of all tensor ranks into one tensor. Raises ValueError for inconsistent shapes."""
    # Shapes on one of T tensor ranks, of a matrix [out, in]: rows
    # split [out / T, in], columns split [out, in / T]. The split axis
    # may have any size, all other axes must be equal on all ranks.
    is_matrix = name.endswith(".weight") and "norm" not in name
    are_columns = name.endswith(("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"))
    is_first = name.endswith(("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"))
    is_gated = is_first and getattr(args, "swiglu", False)
    if name.startswith(("decoder.layers.", "embedding.", "output_layer")) and (
        any(part.ndim != 1 + is_matrix for part in parts)
        or len({part.shape[:1] if are_columns else part.shape[1:] for part in parts}) > 1
        or (is_gated and any(len(part) % 2 for part in parts))
    ):
        shapes = ", ".join(str(list(part.shape)) for part in parts[:8])
        raise ValueError(
            f"{name}: got shapes {shapes} on the tensor ranks, expected equal shards of one tensor"
        )
    # columns (dim 1) of the output projections, rows of
    # the other sharded tensors, replicas of the rest
    if are_columns:
        return torch.cat(parts, dim=1)
    if is_gated:  # every shard is [gate; up]: concatenate all gates, then all up projections
        # torch.cat(parts) would give [gate 0; up 0; gate 1; up 1], the whole matrix is
        # [gate 0; gate 1; up 0; up 1]
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    is_qkv = name.endswith(("linear_qkv.weight", "linear_qkv.bias"))
    if is_qkv or is_first or name in (EMBEDDING, "output_layer.weight"):
        return torch.cat(parts)
    # Norms, the biases of the output projections and positions are on every
    # rank. Unequal replicas are, for example, files of different steps.
    for part in parts[1:]:
        if not torch.equal(part, parts[0]):
            raise ValueError(f"{name}: differs between tensor ranks, expected equal tensors")
    return parts[0]
