"""Read checkpoints of Megatron-LM and Megatron-DeepSpeed and merge their tensor and pipeline ranks.

    iter_0000100/mp_rank_TT/model_optim_rng.pt            Megatron-LM, tensor rank TT
    iter_0000100/mp_rank_TT_PPP/model_optim_rng.pt        ... and pipeline rank PPP
    global_step100/mp_rank_TT_model_states.pt             Megatron-DeepSpeed without pipeline
    global_step100/layer_LL-model_TT-model_states.pt      ... with its pipeline, one file per layer

and torch_dist folders (megatron_dist.py).

The settings are in `args` of the rank files. Megatron-LM has two families of names, legacy and core; both are
supported (megatron_names.py). Tensor parallelism splits the rows of the embedding, of query_key_value and of
the first MLP matrix over the tensor ranks in order, and the columns of the two output projections; norms are
on every rank. The rows of query_key_value are, for each key head: its query heads, the key, the value. The
rows of a gated first matrix are, on each rank: its share of the gate, then its share of the up projection.
"""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.convert.megatron_args import (
    MASKED_DIFFUSION,
    check_args,
    count_tokens,
    get_args,
    infer_rate_min,
    move_mask_row,
    read_model_options,
    read_objective,
    rotary_is_used,
)
from megatron.checkpoint.convert.megatron_dist import is_torch_dist_checkpoint, read_torch_dist
from megatron.checkpoint.convert.megatron_names import UNKNOWN, convert_names, normalize_names
from megatron.checkpoint.convert.pickled_tensors import read_pickled_tensors
from megatron.checkpoint.model_weights import Weights
from megatron.config.schema import ModelConfig
from megatron.log import get_logger

log = get_logger(__name__)

NEWEST_FILES = {"latest_checkpointed_iteration.txt": "iter_{:0>7}", "latest": "{}"}
# mp_rank_TT or mp_rank_TT_PPP: the numbers
# of the tensor rank and of the pipeline rank
RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")  # the second name is used with a distributed optimizer
RankTensors = dict[int, dict[str, Tensor]]  # tensor rank -> plain name -> tensor


def is_megatron_checkpoint(folder: Path) -> bool:
    """Return True if a folder, or the newest step in it, has rank files of either layout, or torch_dist's."""
    step = _find_step_folder(folder)
    return is_torch_dist_checkpoint(step) or any(True for _ in _iter_rank_paths(step))


def read_megatron(folder: Path, n_tokens: int | None = None, objective: str | None = None) -> Weights:
    """Load the weights of a checkpoint, or of the newest step in a folder of checkpoints, as float32.

    n_tokens    number of ids among the rows of the padded vocabulary; default: args.vocab_size, else all rows
    objective   training objective, if args do not determine it

    Raises FileNotFoundError, or ValueError for inconsistent shards, unsupported models and an unknown
    objective.
    """
    step = _find_step_folder(folder)
    args, shards = _read_shards(step)
    check_args(args, step)
    objective = read_objective(args, objective, step)
    if unknown := sorted(name for shard in shards.values() for name in shard if name.startswith(UNKNOWN)):
        raise ValueError(
            f"{step}: got the tensor {unknown[0].removeprefix(UNKNOWN)}, which this model does not have"
        )
    try:
        merged = {
            name: _merge_ranks(name, [shards[rank][name] for rank in sorted(shards)], args)
            for name in shards[0]
        }
    except KeyError as error:
        raise ValueError(
            f"{step}: tensor rank 0 has {error}, another rank does not; a file is missing"
        ) from error
    if "word_embeddings.weight" not in merged:
        raise ValueError(f"{step}: got no word_embeddings.weight, expected a Megatron language model")
    ids = count_tokens(args, n_tokens, len(merged["word_embeddings.weight"]), objective, step)
    if objective == MASKED_DIFFUSION:
        move_mask_row(args, merged, ids, step)
        log.info("%s: masked diffusion, row %d of the embedding is [MASK]", step, ids)
    try:
        config = build_config(args, merged, ids, step)
    except (TypeError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{step}: got args of another type or range than expected ({error})") from error
    try:
        state = convert_names(merged, config)
    except ValueError as error:
        raise ValueError(f"{step}: {error}") from error
    weights = Weights(
        config=config,
        objective=objective,
        rate_min=infer_rate_min(args, objective),
        state={name: value.float().contiguous() for name, value in state.items()},
        seq_len=getattr(args, "seq_length", None),
        source=str(step),
    )
    weights.build_model()  # raises ValueError for a missing tensor or a wrong shape
    return weights


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


def _iter_rank_paths(step: Path) -> Iterator[Path]:
    """Yield the folders or files of all ranks, sorted."""
    if step.is_dir():
        for path in sorted(step.iterdir()):
            if RANK_FOLDER.fullmatch(path.name) or RANK_FILE.fullmatch(path.name):
                yield path


def _read_shards(step: Path) -> tuple[Namespace, RankTensors]:
    """Return args and each tensor rank's tensors, with blocks numbered across all pipeline ranks."""
    if is_torch_dist_checkpoint(step):
        args, tensors = read_torch_dist(step)
        return args, {0: normalize_names(tensors)}
    paths = list(_iter_rank_paths(step))
    if not paths:
        raise FileNotFoundError(f"{step}: got no mp_rank_* files, expected a Megatron checkpoint")
    if (step / "zero").is_dir():
        raise ValueError(
            f"{step}: got a universal checkpoint of DeepSpeed, expected one of Megatron-DeepSpeed. "
            "Convert the global_step folder that it was made from."
        )
    # With DeepSpeed's pipeline, rank files contain args
    # but no tensors; those are in the layer files.
    if any(LAYER_FILE.fullmatch(path.name) for path in step.iterdir()):
        return get_args(read_pickled_tensors(paths[0]), paths[0]), _read_layer_files(step)
    parts: dict[tuple[int, int], Any] = {}
    for i, path in enumerate(paths):
        log.info("reading %s (%d of %d)", path, i + 1, len(paths))
        match = RANK_FOLDER.fullmatch(path.name) or RANK_FILE.fullmatch(path.name)
        assert match is not None, "_iter_rank_paths yields matching names only"
        file = next((path / name for name in RANK_FILES if (path / name).is_file()), path / RANK_FILES[0])
        pipeline_rank = int(match[2] or 0) if path.is_dir() else 0
        parts[int(match[1]), pipeline_rank] = read_pickled_tensors(file if path.is_dir() else path)
    # Ranks are numbered from 0, so the largest numbers
    # give the sizes; their product detects a missing file.
    n_tensor = 1 + max(tensor for tensor, _ in parts)
    n_pipeline = 1 + max(pipeline for _, pipeline in parts)
    if len(parts) != n_tensor * n_pipeline:
        raise ValueError(
            f"{step}: got files of {len(parts)} ranks, expected {n_tensor} x {n_pipeline}; a file is missing"
        )
    args = get_args(parts[0, 0], paths[0])
    # Rows of query_key_value by version, for H
    # heads: 0 is [3, H, K], 1 is [H, K, 3], from
    # 2 on it is [H, 3, K]. All have the same
    # shape, so only the version shows the order.
    version = parts[0, 0].get("checkpoint_version", 3.0)
    if not isinstance(version, (int, float)) or version < 2.0:
        raise ValueError(
            f"{step}: got checkpoint_version {version}, expected 2 or more; older ones order QKV differently"
        )
    shards: RankTensors = {}
    for tensor_rank in range(n_tensor):
        stages = [parts[tensor_rank, pipeline_rank] for pipeline_rank in range(n_pipeline)]
        stages = [_get_table(stage, "module", step) for stage in stages]
        shards[tensor_rank] = _join_stages(stages, step)
    return args, shards


def _join_stages(stages: list[dict[str, Any]], step: Path) -> dict[str, Tensor]:
    """Merge the pipeline stages of one tensor rank.

    With an interleaved schedule a stage has several chunks (model0, model1, ...). The layer order is chunk 0
    of all stages, then chunk 1 of all stages, and so on.
    """
    # Example: 8 layers, 2 stages, 2 chunks. Stage 0 has layers 0-1 in model0
    # and 4-5 in model1, stage 1 has 2-3 and 6-7. The chunks are therefore
    # joined in the order (0, stage 0), (0, stage 1), (1, stage 0), ...
    if "model0" in stages[0]:
        n_chunks = sum(bool(re.fullmatch(r"model\d+", str(key))) for key in stages[0])
        chunks = [_get_table(stage, f"model{i}", step) for i in range(n_chunks) for stage in stages]
    else:
        chunks = [_get_table(stage, "model", step) for stage in stages]
    rank_tensors: dict[str, Tensor] = {}
    # Megatron numbers the layers of every chunk
    # from 0: add the layers of all earlier chunks.
    n_before = 0
    for chunk in chunks:
        chunk_tensors = normalize_names(chunk)
        blocks = {int(name.split(".")[1]) for name in chunk_tensors if name.startswith("layers.")}
        for name, tensor in chunk_tensors.items():
            if name.startswith("layers."):
                _, number, rest = name.split(".", 2)
                name = f"layers.{int(number) + n_before}.{rest}"
            _add_tensor(rank_tensors, name, tensor, step)  # the last stage has a copy of a tied embedding
        n_before += len(blocks)
    return rank_tensors


def _get_table(part: Any, key: str, step: Path) -> dict[str, Any]:
    """Return `part[key]`, or `part` if it lacks the key. Raises ValueError if that is not a dictionary."""
    table = part.get(key, part) if isinstance(part, dict) else part
    if not isinstance(table, dict):
        raise ValueError(f"{step}: {key}: got {type(table).__name__}, expected a dictionary of tensors")
    return table


def _read_layer_files(step: Path) -> RankTensors:
    """Read Megatron-DeepSpeed's layer files: names in a file show its layer type, file numbers the order."""
    shards: RankTensors = {}
    # sorted by number, not by name: as text, layer_100 would come before layer_11
    paths = sorted((int(m[1]), int(m[2]), p) for p in step.iterdir() if (m := LAYER_FILE.fullmatch(p.name)))
    # File numbers count the embedding and other layers
    # too: number the blocks in file order instead.
    for number, (_, tensor_rank, path) in enumerate(paths):
        log.info("reading %s (%d of %d)", path, number + 1, len(paths))
        tensors, shard = read_pickled_tensors(path), shards.setdefault(tensor_rank, {})
        # blocks of this tensor rank so far: each
        # rank has its own file of every layer
        n_before = len({name.split(".")[1] for name in shard if name.startswith("layers.")})
        if any(name.startswith("self_attention.") for name in tensors):
            named = {f"layers.{n_before}.{name}": tensor for name, tensor in tensors.items()}
        elif set(tensors) <= {"weight", "bias"}:
            named = {f"final_layernorm.{name}": tensor for name, tensor in tensors.items()}
        else:  # the embedding (a second time at the end if it is tied), or a separate head
            named = {name.replace("lm_head.", "output_layer."): tensor for name, tensor in tensors.items()}
        for name, tensor in normalize_names(named).items():
            _add_tensor(shard, name, tensor, step)
    return shards


def _add_tensor(shard: dict[str, Tensor], name: str, tensor: Tensor, step: Path) -> None:
    """Add a tensor. Raises ValueError if a different tensor has its name."""
    if name in shard and not torch.equal(shard[name], tensor):
        raise ValueError(
            f"{step}: got two different tensors {name}; its pipeline stages are of different models"
        )
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
    if name.startswith(("layers.", "word_embeddings", "output_layer", "position_embeddings")) and (
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
    if is_qkv or is_first or name in ("word_embeddings.weight", "output_layer.weight"):
        return torch.cat(parts)
    # Norms, the biases of the output projections and positions are on every
    # rank. Unequal replicas are, for example, files of different steps.
    for part in parts[1:]:
        if not torch.equal(part, parts[0]):
            raise ValueError(f"{name}: differs between tensor ranks, expected equal tensors")
    return parts[0]


def build_config(args: Namespace, merged: dict[str, Tensor], n_tokens: int, step: Path) -> ModelConfig:
    """Return the model configuration given by args and tensor shapes. Raises ValueError without an MLP."""

    def get_arg(name: str, default: Any) -> Any:
        value = getattr(args, name, None)
        return default if value is None else value

    if "layers.0.mlp.linear_fc2.weight" not in merged:
        raise ValueError(f"{step}: got no MLP in its first layer, expected a Megatron transformer")
    rows, d_model = merged["word_embeddings.weight"].shape
    n_heads = args.num_attention_heads
    d_head = get_arg("kv_channels", d_model // n_heads)
    options = read_model_options(args, d_head, step)
    if not rotary_is_used(args):
        options = {key: value for key, value in options.items() if not key.startswith(("rope_", "rotary_"))}
    # num_query_groups counts only with its switch: Megatron-LM's
    # default is 1 also for ordinary attention. Megatron-DeepSpeed has
    # num_key_value_heads instead, whose default is the number of heads.
    groups = get_arg("num_query_groups", n_heads) if get_arg("group_query_attention", False) else n_heads
    positions = merged.get("position_embeddings.weight")
    return ModelConfig(
        d_model=d_model,
        # [D, F] in both kinds of MLP; the rows of
        # the first matrix are F or, if gated, 2 F
        d_ff=merged["layers.0.mlp.linear_fc2.weight"].shape[1],
        d_head=d_head,
        n_heads=n_heads,
        n_kv_heads=min(groups, get_arg("num_key_value_heads", groups)),
        n_layers=len({name.split(".")[1] for name in merged if name.startswith("layers.")}),
        n_tokens=n_tokens,
        vocab_rows=rows,
        rope_theta=float(get_arg("rotary_base", get_arg("rope_theta", 10000.0))),
        norm_eps=get_arg("norm_epsilon", get_arg("layernorm_epsilon", 1e-5)),
        norm="rmsnorm" if get_arg("normalization", "LayerNorm").lower() == "rmsnorm" else "layernorm",
        positions="rotary" if rotary_is_used(args) else "learned",
        n_positions=None if positions is None else len(positions),
        tied_embedding="output_layer.weight" not in merged,
        qk_norm="layers.0.self_attention.q_layernorm.weight" in merged,
        **options,
    )
