"""Tokenizers of llama2.c: pieces with scores, merged in the order of scores as in SentencePiece's BPE.

File format: int32 longest piece, then for each id float32 score, int32 length and the piece in UTF-8. Ids 0,
1 and 2 are <unk>, <s>, </s>; 3..258 are the bytes as <0xNN>.

Encoding (`encode` in run.c of llama2.c): a space is put before the text. A character that is not a piece
becomes its bytes. Then the neighbours whose merged piece has the best score are merged, the leftmost first,
until no merge is possible. Stories are separated only by <s>, which is therefore the end-of-document token.
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
    """Tokenizer of llama2.c through the `tokenizers` library. <s> is the end-of-document token."""

    def __init__(self, path: Path) -> None:
        """Raises FileNotFoundError, or ValueError for a file of another format."""
        pieces, scores = read_pieces(path)
        super().__init__(build_library_tokenizer(pieces, scores), str(path))
        eod_id = self.inner.token_to_id("<s>")
        assert eod_id is not None, "read_pieces names piece 1 <s>"
        self.eod = Eod(eod_id, "<s>", "llama2.c")


def read_pieces(path: Path) -> tuple[list[str], list[float]]:
    """Return the piece and score of each id. Raises FileNotFoundError, or ValueError for other formats."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such tokenizer file")
    raw = path.read_bytes()
    pieces: list[str] = []
    scores: list[float] = []
    offset = 4  # after the length of the longest piece
    try:
        while offset < len(raw):
            # raises struct.error if fewer than 8 bytes remain
            score, n_bytes = PIECE.unpack_from(raw, offset)
            offset += PIECE.size
            # a truncated or foreign file: the piece would end outside the file
            if not 0 < n_bytes <= len(raw) - offset:
                raise ValueError(f"piece {len(pieces)} has {n_bytes} bytes")
            # llama2.c stores "\n<s>\n" and "\n</s>\n" for ids 1 and 2
            pieces.append(SPECIAL.get(len(pieces)) or raw[offset : offset + n_bytes].decode())
            scores.append(score)
            offset += n_bytes
        byte_pieces = [f"<0x{byte:02X}>" for byte in range(N_BYTES)]
        if pieces[len(SPECIAL) : len(SPECIAL) + N_BYTES] != byte_pieces:
            raise ValueError("ids 3 to 258 are not the 256 bytes")
    except (struct.error, ValueError) as error:
        raise ValueError(f"{path}: got another format ({error}), expected a tokenizer of llama2.c") from error
    return pieces, scores


def build_library_tokenizer(pieces: list[str], scores: list[float]) -> Tokenizer:
    """Build the equivalent tokenizer of the `tokenizers` library, with ordered merges instead of scores.

    Each piece yields one merge for every split into two pieces. The sort is stable: merges of equal score
    stay in the order of ids.
    """
    ids = {piece: i for i, piece in enumerate(pieces)}
    joins = []
    # from the first piece after the special tokens and the bytes, which are not the result of a merge
    for i in range(len(SPECIAL) + N_BYTES, len(pieces)):
        piece = pieces[i]
        # "the" may arise from (t, he) or (th, e), depending on which neighbours were merged before: both are
        # merges, with the score of "the".
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        joins += [(-scores[i], pair) for pair in splits if pair[0] in ids and pair[1] in ids]
    # best score first, because the library prefers earlier merges
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
    # applied only if special tokens are requested, as transformers does
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    return inner
