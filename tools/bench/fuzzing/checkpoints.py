"""Fuzz targets of checkpoints: both layouts of runs, Hugging Face and Megatron."""

import hashlib
import io
import json
import pickle
import pickletools
import random
import struct
import zipfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuzzing.cases import FileCase
from fuzzing.harness import FuzzTarget, WrongAnswerError
from fuzzing.mutate import EXTREMES, VALUES, mutate_bytes, mutate_json, mutate_tree

# Small, so that an input takes milliseconds. 50 ids in 64 rows: the padding of the vocabulary is not 0.
SHAPE = {
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "d_head": 8,
    "d_ff": 32,
    "n_tokens": 50,
    "vocab_rows": 64,
}


def mutate_pickle(rng: random.Random, content: bytes) -> bytes:
    """Change one argument, or drop, repeat or swap an opcode; in one of five cases mutate bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, content)
    try:
        places = [(op, arg, at) for op, arg, at in pickletools.genops(content)]
    except ValueError:
        return mutate_bytes(rng, content)
    # an opcode reaches from its position to that of the next one
    ends = [at for _, _, at in places[1:]] + [len(content)]
    parts = [content[at:end] for (_, _, at), end in zip(places, ends, strict=True)]
    at, kind = rng.randrange(len(parts)), rng.randrange(8)
    if kind <= 2:
        # Opcodes with an argument are few, so they are chosen directly. PUT and GET have a place of the memo
        # as argument; these, and opcodes such as GLOBAL, are replaced by another opcode of the same file.
        with_arg = [i for i, (_, arg, _) in enumerate(places) if isinstance(arg, int | str | float)]
        at = rng.choice(with_arg)
        name, arg = places[at][0].name, places[at][1]
        if not name.startswith(("BIN", "SHORT_BIN", "LONG")) or name.endswith(("PUT", "GET")):
            parts[at] = parts[rng.randrange(len(parts))]
        elif isinstance(arg, str):
            words = (
                "x",
                "",
                "../x",
                "os",
                "system",
                "posix\nsystem",
                "a" * 300,
                "__0_0.distcp",
                "torch",
                "\ud800",
            )
            # the opcode of a string: its pickle without protocol, memo and stop
            parts[at] = pickle.dumps(rng.choice(words), 2)[2:-1].rstrip(b"q\x00") or b"N"
        else:
            # a pickle of protocol 2 is 80 02, opcodes, "."; [2:-1] are the opcodes of the number
            number = rng.choice([value for value in EXTREMES if isinstance(value, int)])
            parts[at] = pickle.dumps(number if rng.random() < 0.6 else arg + rng.choice((-1, 1, 8)), 2)[2:-1]
    elif kind == 3:
        del parts[at]
    elif kind == 4:
        parts.insert(at, parts[at])
    elif kind == 5:
        other = rng.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
    elif kind == 6:
        # None, 1, containers, marks, POP, and the opcodes that act on the stack: REDUCE calls, BUILD sets the
        # state, STACK_GLOBAL imports, BINPERSID loads a storage. Most find operands of another type than
        # expected.
        parts[at] = rng.choice(
            (b"N", b"K\x01", b"}", b"]", b")", b"(", b"0", b"R", b"b", b"s", b"u", b"e", b"\x93", b"Q")
        )
    else:
        # the fifth and sixth import os.system, which a reader of weights must refuse; "2" is DUP
        parts.insert(
            at, rng.choice((b"N", b"(", b"}", b"0", b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"2"))
        )
    return b"".join(parts)


def mutate_torch(rng: random.Random, content: bytes) -> bytes:
    """Mutate the pickle in a torch file, another record, or bytes of the zip."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    # the archive is written anew below, so the CRC of a mutated record is valid and its content is read
    inner = next(name for name in records if name.endswith("data.pkl"))
    name = inner if rng.random() < 0.75 else rng.choice(list(records))
    if name == inner:
        records[name] = mutate_pickle(rng, records[name])
    elif rng.random() < 0.2:
        del records[name]
    else:
        records[name] = mutate_bytes(rng, records[name])
    buffer = io.BytesIO()
    # torch stores records without compression
    with zipfile.ZipFile(
        buffer, "w", zipfile.ZIP_DEFLATED if rng.random() < 0.05 else zipfile.ZIP_STORED
    ) as archive:
        for record, data in records.items():
            archive.writestr(record, data)
    return buffer.getvalue()


def mutate_safetensors(rng: random.Random, content: bytes) -> bytes:
    """Mutate the header as a tree in two of three cases, else bytes, mostly near the header."""
    # a safetensors file is: length of the header in 8 bytes, the header as JSON, the tensors
    size = int.from_bytes(content[:8], "little")
    if rng.random() < 0.67:
        header = mutate_json(rng, content[8 : 8 + size])
        return struct.pack("<Q", len(header)) + header + content[8 + size :]
    if rng.random() < 0.8:
        # the length and the header only: a changed number of a tensor is never an error
        return mutate_bytes(rng, content[: 8 + size]) + content[8 + size :]
    return mutate_bytes(rng, content)


def mutate_meta(rng: random.Random, content: bytes) -> bytes:
    """Mutate meta.json; in most cases update its own checksum to the mutated content."""
    from megatron.checkpoint import layout

    if rng.random() < 0.2:
        # the checksum no longer matches; the other cases get past it to the checks of the values
        return mutate_json(rng, content)
    meta = json.loads(content)
    meta.pop(layout.META_CHECKSUM)
    changed = mutate_tree(rng, meta)
    if not isinstance(changed, dict):
        return json.dumps(changed).encode()
    return json.dumps({**changed, layout.META_CHECKSUM: layout.compute_meta_checksum(changed)}).encode()


def make_model(**more: Any) -> Any:
    """Return a small model with fixed weights."""
    import torch

    from megatron.config.schema import ModelConfig
    from megatron.model.transformer import Gpt

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return Gpt(ModelConfig(**{**SHAPE, **more}))


def write_full(folder: Path) -> Path:
    """Write a run's checkpoint in the full layout."""
    import torch

    from megatron.checkpoint import store

    # a checkpoint with 4 parts, as training writes it: weights, moments, schedule and state
    model = make_model()
    state = model.state_dict()
    moments = {
        name: {"exp_avg": torch.zeros_like(of), "step": torch.tensor(3.0)} for name, of in state.items()
    }
    config = {
        "model": asdict(model.config),
        "objective": {"name": "autoregressive"},
        "dataset": {"seq_len": 32},
    }
    parts = {"model": state, "optim": {"state": moments}, "lr": {"step": 3}, "iter": {"step": 3}}
    return store.save_checkpoint(folder, "step", parts, {"identity": "abc", "step": 3, "config": config})


def seal_checkpoint(checkpoint: Path, changed: Path) -> None:
    """Write the checksum of a mutated file to meta.json, as anyone who can change the file could."""
    from megatron.checkpoint import layout

    path = checkpoint / layout.META
    meta = json.loads(path.read_text())
    meta.pop(layout.META_CHECKSUM, None)
    content = changed.read_bytes()
    meta["files"][changed.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    path.write_text(json.dumps({**meta, layout.META_CHECKSUM: layout.compute_meta_checksum(meta)}))


class CheckpointCase(FileCase):
    """A checkpoint whose checksums match its files after the mutation."""

    def read(self, files: dict[str, bytes]) -> None:
        """Read as in FileCase, with updated checksums."""
        # Sealing also changes meta.json. It is restored even if it is not the mutated file, or the next input
        # would have a stale checksum.
        meta = self.folder / "meta.json"
        whole = meta.read_bytes()
        try:
            for name, content in files.items():
                (self.folder / name).write_bytes(content)
                if name != "meta.json":
                    seal_checkpoint(self.folder, self.folder / name)
            self.read_all()
        finally:
            meta.write_bytes(whole)
            for name in files:
                (self.folder / name).write_bytes(self.valid[name])


def _check_weights(weights: Any) -> None:
    """Build the model of the weights. Raise WrongAnswerError if it is too large for the small file."""
    # A file of some KB cannot contain 10 million parameters: the reader would have trusted a damaged header.
    model = weights.build_model()
    if sum(parameter.numel() for parameter in model.parameters()) > 10_000_000:
        raise WrongAnswerError("got a model of more than 10 million parameters from a small file")


def open_full(folder: Path) -> FileCase:
    """Open the parts and meta.json of the full layout."""
    from megatron.checkpoint import store
    from megatron.checkpoint.model_weights import load_weights

    path = write_full(folder)

    def read() -> None:
        _check_weights(load_weights(path))
        store.load_checkpoint(path)

    parts = [part.name for part in path.glob("*.pt")]
    return CheckpointCase(path, {**dict.fromkeys(parts, mutate_torch), "meta.json": mutate_meta}, read)


def open_sharded(folder: Path) -> FileCase:
    """Open the shards and meta.json of the sharded layout."""
    from megatron.checkpoint import reshard, store
    from megatron.checkpoint.model_weights import load_weights

    full = write_full(folder / "full")
    path = folder / "shards" / full.name
    reshard.reshard_to_sharded(full, path)

    def read() -> None:
        _check_weights(load_weights(path))
        store.load_checkpoint(path)

    mutators: dict[str, Any] = {"meta.json": mutate_meta}
    mutators |= {part.name: mutate_safetensors for part in path.glob("*.safetensors")}
    return CheckpointCase(path, mutators, read)


def _make_weights(**more: Any) -> Any:
    from megatron.checkpoint.model_weights import Weights

    model = make_model(**more)
    return Weights(config=model.config, objective="autoregressive", state=model.state_dict(), seq_len=32)


def open_huggingface(folder: Path) -> FileCase:
    """Open config.json, weights in one file, and weights in two files with an index."""
    from safetensors.torch import load_file, save_file

    from megatron.checkpoint.convert.formats import read_any
    from megatron.checkpoint.convert.huggingface import write_huggingface

    for name in ("one", "two"):
        write_huggingface(_make_weights(vocab_rows=50), folder / name)
    tensors = load_file(folder / "two" / "model.safetensors")
    (folder / "two" / "model.safetensors").unlink()
    names, mapping = sorted(tensors), {}
    # every second tensor in each file, so that the tensors of a layer are in both
    for i, part in enumerate((names[::2], names[1::2])):
        save_file(
            {name: tensors[name] for name in part}, folder / "two" / f"part{i}.safetensors", {"format": "pt"}
        )
        mapping |= dict.fromkeys(part, f"part{i}.safetensors")
    index = folder / "two" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": mapping}))

    def read() -> None:
        _check_weights(read_any(folder / "one"))
        _check_weights(read_any(folder / "two"))

    mutators = {
        "one/config.json": mutate_json, "one/model.safetensors": mutate_safetensors,
        "two/model.safetensors.index.json": mutate_json, "two/part0.safetensors": mutate_safetensors,
    }  # fmt: skip
    return FileCase(folder, mutators, read)


def open_megatron(folder: Path) -> FileCase:
    """Open a checkpoint of Megatron-LM, and mutate its arguments, tensor names and file."""
    import torch

    from megatron.checkpoint.convert.megatron_layouts import read_megatron

    path = folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
    # d_model 16, 2 heads of 8: linear_qkv has 3 x 2 x 8 = 48 rows. SwiGLU of width 32: fc1 has 2 x 32 = 64.
    shapes = {
        "embedding.word_embeddings.weight": [64, 16], "decoder.final_layernorm.weight": [16],
        "decoder.layers.0.input_layernorm.weight": [16], "decoder.layers.0.pre_mlp_layernorm.weight": [16],
        "decoder.layers.0.self_attention.linear_qkv.weight": [48, 16],
        "decoder.layers.0.self_attention.linear_proj.weight": [16, 16],
        "decoder.layers.0.mlp.linear_fc1.weight": [64, 16],
        "decoder.layers.0.mlp.linear_fc2.weight": [16, 32],
    }  # fmt: skip
    args = {
        "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "group_query_attention": False,
        "num_query_groups": 2, "kv_channels": 8, "swiglu": True, "seq_length": 16, "vocab_size": 50,
        "padded_vocab_size": 64, "add_bias_linear": False, "norm_epsilon": 1e-5, "normalization": "RMSNorm",
        "rotary_percent": 1.0, "position_embedding_type": "rope", "rotary_base": 10000, "num_experts": None,
        "bidirectional_attention": False, "untie_with_additional_mask": False, "params_dtype": "x",
    }  # fmt: skip

    def save_bytes(args: Any, shapes: Any, **more: Any) -> bytes:
        model = {
            # type(n) is int: True is also an int, but not a dimension. A mutated shape of 2^40 is saved as a
            # list.
            name: torch.zeros(shape) if isinstance(shape,
            list) and all(type(n) is int and 0 <= n < 99 for n in shape)
            else shape for name, shape in shapes.items()
        }  # fmt: skip
        buffer = io.BytesIO()
        torch.save({"args": Namespace(**args), "checkpoint_version": 3.0, "model": model, **more}, buffer)
        return buffer.getvalue()

    path.write_bytes(save_bytes(args, shapes))

    def mutate(rng: random.Random, content: bytes) -> bytes:
        kind = rng.randrange(6)
        if kind == 0:
            return mutate_torch(rng, content)
        if kind == 1:
            changed = mutate_tree(rng, shapes)
            return save_bytes(args, changed if isinstance(changed, dict) else shapes)
        if kind == 2:
            key = rng.choice(("model", "checkpoint_version", "module", "args", "model0"))
            extra = {key: rng.choice((*VALUES, *EXTREMES))}
            return save_bytes(args, shapes, **extra) if key != "args" else save_bytes(extra, shapes)
        changed = mutate_tree(rng, args)
        return save_bytes(changed if isinstance(changed, dict) else {}, shapes)

    name = str(path.relative_to(folder))
    return FileCase(
        folder, {name: mutate}, lambda: _check_weights(read_megatron(folder, objective="autoregressive"))
    )


TARGETS = (
    FuzzTarget("full checkpoints", 2, open_full),
    FuzzTarget("sharded checkpoints", 2, open_sharded),
    FuzzTarget("Hugging Face folders", 3, open_huggingface),
    FuzzTarget("Megatron checkpoints", 2, open_megatron),
)
