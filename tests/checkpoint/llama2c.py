"""llama2.c's trained model stories260K and its tokenizer as a Hugging Face folder, for tests.

A model's file: seven int32 (d_model, d_ff, layers, heads, key-value heads, tokens, positions), then float32
tensors, each stacked over all layers. llama2.c rotates channels 2i and 2i + 1; this model rotates channels i
and i + K / 2, so the rows of query and key are reordered. A tokenizer's file: int32 longest piece, then for
each id float32 score, int32 length and the piece; ids 0, 1 and 2 are <unk>, <s>, </s>, then the 256 bytes.
"""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from megatron.checkpoint.convert.huggingface import write_huggingface
from megatron.checkpoint.model_weights import Weights
from megatron.config.schema import ModelConfig

N_NOT_MERGED = 3 + 256
SPECIAL = {0: "<unk>", 1: "<s>", 2: "</s>"}  # llama2.c stores the last two between line ends


def read_llama2c(path: Path) -> Weights:
    """Load a model with a tied embedding."""
    d, f, n_layers, n_heads, n_kv_heads, n_tokens, n_positions = np.fromfile(path, "<i4", 7).tolist()
    d_head = d // n_heads
    shared = n_kv_heads * d_head
    stacked = {
        "attention_norm.weight": (d,), "attention.query.weight": (d, d), "attention.key.weight": (shared, d),
        "attention.value.weight": (shared, d), "attention.out.weight": (d, d), "mlp_norm.weight": (d,),
        "mlp.gate.weight": (f, d), "mlp.down.weight": (d, f), "mlp.up.weight": (f, d),
    }  # fmt: skip
    numbers = torch.from_numpy(np.fromfile(path, "<f4", offset=28))
    offset = 0

    def read_next(*shape: int) -> Tensor:
        nonlocal offset
        begin, offset = offset, offset + int(np.prod(shape))
        return numbers[begin:offset].reshape(shape).clone()

    state = {"embedding.weight": read_next(n_tokens, d)}
    for name, shape in stacked.items():
        is_rotated = name in ("attention.query.weight", "attention.key.weight")
        for layer, tensor in enumerate(read_next(n_layers, *shape)):
            state[f"blocks.{layer}.{name}"] = deinterleave_rows(tensor, d_head) if is_rotated else tensor
    state["norm.weight"] = read_next(d)
    config = ModelConfig(
        d_model=d, d_ff=f, d_head=d_head, n_heads=n_heads, n_kv_heads=n_kv_heads, n_layers=n_layers,
        n_tokens=n_tokens, vocab_rows=n_tokens,
    )  # fmt: skip
    return Weights(
        config=config, objective="autoregressive", state=state, seq_len=n_positions, source=str(path)
    )


def deinterleave_rows(rows: Tensor, d_head: int) -> Tensor:
    """Reorder rows [H * K, D] of each head from rotated pairs (2i, 2i + 1) to halves (i, i + K / 2)."""
    # [H, K / 2, 2, D] -> [H, 2, K / 2, D]: index (pair, part) becomes (part, pair)
    return rows.unflatten(0, (-1, d_head // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def read_pieces(path: Path) -> tuple[list[str], list[float]]:
    """Return the piece and score of each id."""
    raw, offset = path.read_bytes(), 4
    pieces: list[str] = []
    scores: list[float] = []
    while offset < len(raw):
        score, n_bytes = struct.unpack_from("<fi", raw, offset)
        offset += 8 + n_bytes
        pieces.append(SPECIAL.get(len(pieces)) or raw[offset - n_bytes : offset].decode())
        scores.append(score)
    return pieces, scores


def build_library_tokenizer(pieces: list[str], scores: list[float]) -> Tokenizer:
    """Build the equivalent tokenizer: each piece is the merge of every split into two pieces, best first."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    joins = []
    for i, piece in list(enumerate(pieces))[N_NOT_MERGED:]:
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        joins += [(-scores[i], pair) for pair in splits if pair[0] in ids and pair[1] in ids]
    joins.sort(key=lambda join: join[0])  # stable: equal scores stay in the order of ids
    merges = [pair for _, pair in joins]
    inner = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Prepend(" ")
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    strip = decoders.Strip(content=" ", left=1, right=0)
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), strip])
    return inner


def export_stories(source: Path, folder: Path) -> Path:
    """Write `source`, the folder of stories260K, as the Hugging Face folder `folder`/hf, and return it.

    Stories are separated only by <s>, which is therefore the end-of-document token.
    """
    (folder / "tokenizer").mkdir()
    build_library_tokenizer(*read_pieces(source / "tok512.bin")).save(
        str(folder / "tokenizer/tokenizer.json")
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {"bos_token": "<s>", "eos_token": "<s>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    weights = replace(read_llama2c(source / "stories260K.bin"), tokenizer=str(folder / "tokenizer"))
    write_huggingface(weights, folder / "hf")
    return folder / "hf"
