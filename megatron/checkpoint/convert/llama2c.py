"""Read and write the first format of llama2.c's run.c: a header of seven int32, then float32 tensors.

Header: d_model, d_ff, layers, heads, key-value heads, tokens (negative if the head is a separate matrix),
positions. Tensors, each stacked over all layers: embedding, attention norms, query, key, value, out, MLP
norms, gate, down, up, final norm, cosines and sines of the rotary embedding, then the head if it is not the
embedding. llama2.c rotates channels 2i and 2i + 1; this model rotates channels i and i + K / 2, so the rows
of query and key are reordered.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.convert.huggingface_config import choose_model_type
from megatron.checkpoint.model_weights import Weights
from megatron.config.schema import ModelConfig
from megatron.io import write_atomic_bytes

# little-endian without padding, 28 bytes; run.c reads the same seven ints as a C struct
HEADER = struct.Struct("<7i")
BLOCK_TENSORS = (  # name, and whether the rotary embedding applies to its rows
    ("attention_norm.weight", False),
    ("attention.query.weight", True),
    ("attention.key.weight", True),
    ("attention.value.weight", False),
    ("attention.out.weight", False),
    ("mlp_norm.weight", False),
    ("mlp.gate.weight", False),
    ("mlp.down.weight", False),
    ("mlp.up.weight", False),
)


@dataclass(frozen=True)
class _Header:
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    n_tokens: int
    n_positions: int

    @property
    def is_tied(self) -> bool:
        """True if the embedding is also the head."""
        return self.n_tokens > 0

    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one block's tensors by name."""
        d, f, k = self.d_model, self.d_ff, self.d_model // self.n_heads
        shared = self.n_kv_heads * k
        sizes = [(d,), (d, d), (shared, d), (shared, d), (d, d), (d,), (f, d), (d, f), (f, d)]
        return dict(zip((name for name, _ in BLOCK_TENSORS), sizes, strict=True))

    def count_floats(self) -> int:
        """Return the number of float32 values after the header."""
        blocks = self.n_layers * sum(int(np.prod(shape)) for shape in self.block_shapes().values())
        # two tables [positions, K / 2]
        rotary = self.n_positions * (self.d_model // self.n_heads)
        head = 0 if self.is_tied else 1
        # embedding (and head), blocks, final norm, cosines and sines
        return (1 + head) * abs(self.n_tokens) * self.d_model + blocks + self.d_model + rotary


def read_llama2c(path: Path) -> Weights:
    """Load a llama2.c file. Raises FileNotFoundError, or ValueError for a file of another kind."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    raw = path.read_bytes()
    header = _read_header(path, raw)
    # astype copies: an array over `bytes` is read-only, which torch does not support
    numbers = torch.from_numpy(np.frombuffer(raw, dtype="<f4", offset=HEADER.size).astype(np.float32))
    offset = 0

    def read_next(*shape: int) -> Tensor:
        nonlocal offset
        # consecutive calls read consecutive tensors: the order of the calls is the order of the file
        begin, offset = offset, offset + int(np.prod(shape))
        return numbers[begin:offset].reshape(shape)

    state = {"embedding.weight": read_next(abs(header.n_tokens), header.d_model)}
    d_head = header.d_model // header.n_heads
    # every tensor is stored for all layers at once: [layers, *shape]
    for name, is_rotated in BLOCK_TENSORS:
        for layer, tensor in enumerate(read_next(header.n_layers, *header.block_shapes()[name])):
            state[f"blocks.{layer}.{name}"] = (
                # Scores are sums over channels, so the same permutation of query and key rows leaves them
                # unchanged. It only moves the two channels that rotate together to the places where this
                # model's rotation expects them.
                deinterleave_rows(tensor, d_head) if is_rotated else tensor.clone()
            )
    state["norm.weight"] = read_next(header.d_model)
    config = ModelConfig(
        d_model=header.d_model,
        d_ff=header.d_ff,
        d_head=d_head,
        n_heads=header.n_heads,
        n_kv_heads=header.n_kv_heads,
        n_layers=header.n_layers,
        n_tokens=abs(header.n_tokens),
        vocab_rows=abs(header.n_tokens),
    )
    return Weights(
        config=config, objective="autoregressive", state=state, seq_len=header.n_positions, source=str(path)
    )


def write_llama2c(weights: Weights, path: Path) -> None:
    """Write a Llama-like model for llama2.c's run.c. Raises ValueError if the format cannot represent it."""
    config, state = weights.config, weights.strip_spare_rows().state
    if weights.objective != "autoregressive" or config.d_head * config.n_heads != config.d_model:
        raise ValueError(
            f"{path}: llama2.c supports only autoregressive models with n_heads x d_head = d_model"
        )
    kind, reason = choose_model_type(config)
    if kind != "llama" or config.biases or config.rope_scaling != "none":
        described = reason or f"a model of type {kind}, or of Llama with biases or scaled positions"
        raise ValueError(f"{path}: got {described}, expected a plain Llama, as llama2.c supports")
    if (config.rope_theta, config.norm_eps) != (10000.0, 1e-5):
        raise ValueError(
            f"{path}: llama2.c requires rope_theta 10000 and norm_eps 1e-5, this model has others"
        )
    if path.exists():
        raise ValueError(f"{path}: already exists; choose another name or delete it")
    n_positions = weights.seq_len or 2048
    header = _Header(
        config.d_model,
        config.d_ff,
        config.n_layers,
        config.n_heads,
        config.kv_heads,
        config.n_tokens,
        n_positions,
    )
    tensors = [state["embedding.weight"]]
    for name, is_rotated in BLOCK_TENSORS:
        for layer in range(config.n_layers):
            tensor = state[f"blocks.{layer}.{name}"]
            tensors.append(interleave_rows(tensor, config.d_head) if is_rotated else tensor)
    tensors.append(state["norm.weight"])
    # run.c skips the tables, but computes the place of the next tensor from their size
    tensors += compute_rotary_tables(n_positions, config.d_head)
    body = b"".join(
        tensor.to(torch.float32).contiguous().numpy().astype("<f4").tobytes() for tensor in tensors
    )
    packed = HEADER.pack(*(getattr(header, name) for name in header.__dataclass_fields__))
    write_atomic_bytes(path, packed + body)


def deinterleave_rows(rows: Tensor, d_head: int) -> Tensor:
    """Reorder rows [H * K, D] of each head from rotated pairs (2i, 2i + 1) to halves (i, i + K / 2)."""
    # [H, K / 2, 2, D] -> [H, 2, K / 2, D]: index (pair, part) becomes (part, pair)
    return rows.unflatten(0, (-1, d_head // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def interleave_rows(rows: Tensor, d_head: int) -> Tensor:
    """Invert `deinterleave_rows`."""
    # [H, 2, K / 2, D] -> [H, K / 2, 2, D]
    return rows.unflatten(0, (-1, 2, d_head // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def compute_rotary_tables(n_positions: int, d_head: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each float32 [positions, K / 2], computed in float32 as in llama2.c's model.py."""
    # theta^(-2i / K) for i = 0 ... K / 2 - 1
    frequency = 1.0 / (10000.0 ** (torch.arange(0, d_head, 2)[: d_head // 2].float() / d_head))
    angle = torch.outer(torch.arange(n_positions), frequency).float()
    return angle.cos(), angle.sin()


def _read_header(path: Path, raw: bytes) -> _Header:
    if len(raw) < HEADER.size:
        raise ValueError(f"{path}: got {len(raw)} bytes, expected a llama2.c model")
    header = _Header(*HEADER.unpack(raw[: HEADER.size]))
    sizes = (
        header.d_model,
        header.d_ff,
        header.n_layers,
        header.n_heads,
        header.n_kv_heads,
        header.n_positions,
    )
    # Limits before any product of sizes: a file of another kind has arbitrary numbers here. A negative number
    # of tokens is valid, it marks a separate head.
    plausible = all(0 < size < 2**24 for size in sizes) and header.n_tokens != 0
    if not plausible or header.d_model % header.n_heads or header.n_heads % header.n_kv_heads:
        raise ValueError(
            f"{path}: not a llama2.c model of the first format (header {HEADER.unpack(raw[:28])})"
        )
    if not header.is_tied:
        raise ValueError(f"{path}: got a separate head matrix, expected a tied embedding")
    n_bytes = HEADER.size + 4 * header.count_floats()
    if len(raw) != n_bytes:
        raise ValueError(
            f"{path}: got {len(raw):,} bytes, expected {n_bytes:,} by its header; download the file again"
        )
    return header
