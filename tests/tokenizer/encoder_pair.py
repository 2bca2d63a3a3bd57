"""Comparison of the C++ encoder with the `tokenizers` library, and texts that patterns split differently."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

from megatron import _csrc
from megatron.tokenizer.bpe import BpeTokenizer
from megatron.tokenizer.encoder import NO_EOD, FastEncoder, build_fast_bpe

# what patterns split differently: case, contractions (also with the long s), marks, digits, kinds of space
PIECES = (
    *" \n\t\r'stremvldSTREMVLDkK1a2B3!./_-\u00a0\u2028\u3000\x85\u017f\u212a\u00e9\u4e2d\u3042",
    *"\u30a2\uac00\u0301\u0e33\u0e48\u093c\u0915\u094d\u01c5\u02b0\U0001f642\u200d\ufe0f\u0661\u00bd\u1100\u1161\u0344\u0958\u0345",
    *("  ", "'re", "'ll", "'VE", "\r\n", "\n\n", " \n", "12345", "the", " of", "\u00df", "\ufb05"),
)
BATCH = 1000


def draw_pattern_texts(n: int, seed: int) -> Iterator[str]:
    """Yield sequences of PIECES."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        yield "".join(rng.choice(PIECES, int(rng.integers(1, 60))))


def draw_plane_texts(n: int, seed: int) -> Iterator[str]:
    """Yield code points of all planes; neighbours are mostly of one script."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        blocks = rng.integers(0, rng.choice([0x10, 0x100, 0x1100]), 5)
        points = (rng.choice(blocks, 30) << 8) + rng.integers(0, 256, 30)
        yield "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def draw_token_texts(tokens: Sequence[str], n: int, seed: int) -> Iterator[str]:
    """Yield added tokens, some of them incomplete, among words and spaces."""
    rng = np.random.default_rng(seed)
    others = [" ", "  ", "\n", "a", "x9", "\u00e9", "\u2003", "_", "the", "\u0301", "<", "<|", "|>"]
    for _ in range(n):
        parts = []
        for _ in range(int(rng.integers(1, 14))):
            is_token = bool(tokens) and rng.random() < 0.5
            part = str(rng.choice(tokens if is_token else others))
            parts.append(part[:-1] if is_token and rng.random() < 0.2 else part)
        yield "".join(parts)


def compare_encoders(encoder: FastEncoder, library: Tokenizer, texts: Sequence[str]) -> int:
    """Compare all ids of C++ with the library's; return their number."""
    n_tokens = 0
    for begin in range(0, len(texts), BATCH):
        batch = list(texts[begin : begin + BATCH])
        ids, lengths = encoder.encode(batch)
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        expected = library.encode_batch_fast(batch, add_special_tokens=False)
        for text, part, encoding in zip(batch, parts, expected, strict=True):
            assert part.tolist() == encoding.ids, ascii(text[:2000])
        n_tokens += len(ids)
    return n_tokens


def build_encoder(inner: Tokenizer, special: bool = True) -> FastEncoder:
    """Build the C++ encoder of a library tokenizer."""
    fast, reason = build_fast_bpe(BpeTokenizer(Tokenizer.from_str(inner.to_str()), "test"))
    assert fast is not None, reason
    return FastEncoder(fast, special)


def assert_equal_ids(inner: Tokenizer, texts: Sequence[str], special: bool = True) -> int:
    """Compare all ids of C++ with the library's; return the number of texts."""
    encoder = build_encoder(inner, special)
    inner.encode_special_tokens = not special
    compare_encoders(encoder, inner, texts)
    return len(texts)


def add_random_tokens(inner: Tokenizer, tokens: Sequence[str], rng: np.random.Generator) -> None:
    """Add some of the tokens, each with random conditions."""
    for text in rng.permutation(tokens)[: int(rng.integers(1, 10))]:
        flags = rng.random(5) < 0.4
        flags[1:3] &= not text.isspace()  # the library fails where such tokens overlap
        names = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = AddedToken(str(text), **dict(zip(names, map(bool, flags), strict=True)))
        (inner.add_special_tokens if flags[4] else inner.add_tokens)([token])


def assert_equal_line(inner: Tokenizer, words: Sequence[str], folder: Path) -> None:
    """Compare the ids of a line of megabytes, which is encoded in windows, with the ids of its whole text."""
    encoder = build_encoder(inner)
    text = "".join(random.Random(6).choices(words, k=800_000))
    path = folder / "in"
    path.write_text(json.dumps({"text": text}) + "\n")
    assert path.stat().st_size > 4 << 20  # longer lines are encoded in windows
    counts, ids, _ = encode_range(encoder, path, wide=True)
    assert counts[1] == 1 and not counts[4]
    assert np.array_equal(ids, encoder.encode([text])[0])


def encode_range(
    encoder: FastEncoder, path: Path, begin: int = 0, end: int | None = None, eod: int = NO_EOD,
    special: bool = True, wide: bool = False,
) -> tuple[tuple[int, int, int, int, bool], np.ndarray, np.ndarray]:  # fmt: skip
    """Encode the lines of a range of a file; return (counts, ids, lengths).

    counts   (end of the last line that was encoded, documents, tokens, lines, whether a line is refused)
    wide     ids are written as int32, otherwise as uint16
    """
    names = [path.with_name(name) for name in ("ids", "lengths")]
    end = path.stat().st_size if end is None else end
    with path.open("rb") as file, names[0].open("wb") as ids, names[1].open("wb") as lengths:
        outputs = (wide, ids.fileno(), lengths.fileno())
        counts = _csrc.encode_lines(encoder.worker, file.fileno(), begin, end, "text", special, eod, *outputs)
    return counts, np.fromfile(names[0], "<i4" if wide else "<u2"), np.fromfile(names[1], "<i4")
