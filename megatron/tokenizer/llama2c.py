"""Vocabularies of llama2.c: pieces with scores, joined best score first, as SentencePiece's BPE does.

The file: int32 longest piece, then for each id float32 score, int32 length and the piece's UTF-8. Ids 0, 1
and 2 are <unk>, <s>, </s>; 3..258 are the bytes as <0xNN>. Text gets a space before it; a character that is
no piece becomes its bytes; then the neighbours whose join has the best score are joined, the leftmost first,
until none can be (run.c of llama2.c, `encode`). Stories are separated by <s> alone, which therefore ends one.
"""

import struct
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, processors

from megatron.tokenizer.bpe import BpeTokenizer
from megatron.tokenizer.eod import Eod

PIECE = struct.Struct("<fi")
SPECIAL = {0: "<unk>", 1: "<s>", 2: "</s>"}
N_BYTES = 256


class Llama2cTokenizer(BpeTokenizer):
    """Text to ids and back through the `tokenizers` library. <s> begins every story, and so ends the last."""

    def __init__(self, path: Path) -> None:
        """FileNotFoundError, or ValueError for a file of another kind."""
        pieces, scores = read_pieces(path)
        super().__init__(as_library(pieces, scores), str(path))
        self.eod = Eod(self.inner.token_to_id("<s>"), "<s>", "llama2.c")


def read_pieces(path: Path) -> tuple[list[str], list[float]]:
    """Each id's piece and its score. FileNotFoundError, or ValueError for a file of another kind."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such tokenizer file")
    raw = path.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    at = 4
    try:
        while at < len(raw):
            score, n_bytes = PIECE.unpack_from(raw, at)
            at += PIECE.size
            if not 0 < n_bytes <= len(raw) - at:
                raise ValueError(f"piece {len(pieces)} has {n_bytes} bytes")
            pieces.append(SPECIAL.get(len(pieces)) or raw[at : at + n_bytes].decode())
            scores.append(score)
            at += n_bytes
        wanted = [f"<0x{byte:02X}>" for byte in range(N_BYTES)]
        if pieces[len(SPECIAL) : len(SPECIAL) + N_BYTES] != wanted:
            raise ValueError("ids 3 to 258 are not the 256 bytes")
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path}: not a tokenizer of llama2.c ({error})") from error
    return pieces, scores


def as_library(pieces: list[str], scores: list[float]) -> Tokenizer:
    """The same tokenizer for the `tokenizers` library, which wants joins in order instead of scores."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    joins = []
    for i in range(len(SPECIAL) + N_BYTES, len(pieces)):
        piece = pieces[i]
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        joins += [(-scores[i], pair) for pair in splits if pair[0] in ids and pair[1] in ids]
    joins.sort(key=lambda join: join[0])
    inner = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[pair for _, pair in joins],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    inner.normalizer = normalizers.Prepend(" ")
    # only those who ask the library for special tokens get it: transformers
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    return inner
