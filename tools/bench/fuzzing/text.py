"""Fuzz targets of text: JSON lines in C++ and Python against json and `tokenizers`; compressed files."""

import bz2
import gzip
import io
import json
import lzma
import random
import string
import tarfile
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing.cases import FileCase
from fuzzing.harness import Files, FuzzTarget, RefusedError, WrongAnswerError
from fuzzing.mutate import EXTREMES, ODD_BYTES, mutate_bytes, mutate_json_lines, mutate_text, mutate_tree

# a call of the encoder opens files and writes a shard; a batch divides this cost by 16
BATCH_LINES = 16
WORDS = (
    "plain words of a small text", "it's 'quoted', don't", "  two  blanks\t\ttab\n\nlines\r\n",
    "日本語のテキスト", "naïve café",
    "٣٤٥ ½ ² 12345 3.14", "\U0001f600\U0001f468\u200d\U0001f469", "<|endoftext|> in text", "x" * 300,
    "\u00a0\u2003\u3000",
    "e\u0301 \u0323\u0307 combining", "\u0000nul", "ﬀ ligature Ω Å", "\ufeffbom", "\u2028\u2029", "",
)  # fmt: skip
# A pair of surrogates is one character; alone, swapped or repeated they are not. JSON allows only these
# escapes: \" \\ \/ \b \f \n \r \t \uXXXX.
ESCAPES = (
    "\\n", "\\u0000", "\\ud83d\\ude00", "\\ud800", "\\udc00", "\\udc00\\ud800",
    "\\ud800\\ud800\\udc00", "\\uFFFF",
    "\\/", "\\x41", "\\u12g4", "\\u12", "\\", "\\\"", "\\ud83d\\n", "\\uD83D\\u0041",
)  # fmt: skip
# JSON's grammar forbids a leading zero or plus, a bare point and hexadecimal. Python's json accepts NaN and
# Infinity. 5,000 digits are more than int() converts (4,300).
NUMBERS = (
    "0", "-0", "01", "+1", "1.", ".5", "1e", "1e5", "1E+400", "-1e-400", "9" * 400, "9" * 5000, "NaN",
    "Infinity",
    "-Infinity", "0x10", "1_000", "--1", "-", "1.5e+3", "1e+", "٣",
)  # fmt: skip


def generate_line(rng: random.Random) -> bytes:
    """Return a line that is JSON, or almost."""
    text = "".join(rng.choice(WORDS) for _ in range(rng.randrange(4)))
    if rng.random() < 0.3:
        text += "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000))))
                        for _ in range(rng.randrange(30)))  # fmt: skip
    quoted = json.dumps(text, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.3:
        # from 1: after the opening quote
        at = rng.randrange(1, len(quoted))
        quoted = quoted[:at] + rng.choice(ESCAPES) + quoted[at:]
    value = {
        0: lambda: rng.choice(NUMBERS),
        1: lambda: json.dumps(rng.choice((None, True, [], {}, [1, {"text": "in"}], "x", {"text": "in"}))),
        # 70 is more than the 64 levels of the C++ reader; with depth - 1 one bracket is missing
        2: lambda: "[" * (depth := rng.choice((1, 30, 70, 500, 3000))) + "]" * rng.choice((depth, depth - 1)),
        3: lambda: '{"a":' * (depth := rng.choice((1, 20, 60))) + "1" + "}" * depth,
    }[rng.randrange(4)]()
    blank = rng.choice(("", " ", "\t", "  ", "\r", "\x0b", "\x00")) if rng.random() < 0.2 else ""
    # te\u0078t is another spelling of text: then the key is there twice, and the last value counts
    name = rng.choice(("n", "texts", "tex", "te\\u0078t", "text"))
    fields = [f'"text"{blank}:{blank}{quoted}', f'"{name}": {value}']
    rng.shuffle(fields)
    line = "{" + ", ".join(fields[: rng.choice((1, 2, 2, 2, 0))]) + "}"
    if '"text"' not in line and rng.random() < 0.8:
        line = f'{{"text": {quoted}}}'
    return (blank + line + blank).encode("utf-8", "surrogatepass")


def mutate_line(rng: random.Random, line: bytes) -> bytes:
    """Mutate six of ten lines: bytes, words, the tree, or one character of JSON's syntax."""
    kind = rng.randrange(10)
    if kind < 4:
        return line
    if kind < 6:
        return mutate_bytes(rng, line)
    if kind == 6:
        return mutate_text(rng, line)
    if kind == 7:
        at = rng.randrange(len(line) + 1)
        return (
            line[:at] + rng.choice((b"{", b"}", b'"', b",", b":", b"[", b"]", b"\\", *ODD_BYTES)) + line[at:]
        )
    if kind == 8:
        tree = mutate_tree(rng, {"text": rng.choice(WORDS), "meta": {"text": "x", "n": [1, 2.5]}})
        return json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    # a number instead of the text: not a document, whatever the number
    return json.dumps({"text": rng.choice(EXTREMES), "n": rng.choice(EXTREMES)}).encode()


def reference_text(line: bytes) -> str | None:
    """Return the text of a line according to Python's json; None if it is not a document."""
    try:
        # the project does not evaluate numbers outside the text
        # parse_int=float: int() raises ValueError above 4,300 digits, float() gives Inf
        record = json.loads(line.decode("utf-8-sig"), parse_int=float, parse_float=lambda word: 0.0)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        return None
    # a lone surrogate becomes U+FFFD, a pair its character
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Lines:
    """Blocks of lines, each encoded in three ways: C++ from a file, C++ from a stream, and Python."""

    n_inputs = BATCH_LINES

    def __init__(self, folder: Path, whole: bool = True) -> None:
        from megatron.text.units import EncodeSettings, UnitFolder
        from megatron.tokenizer.bpe import load_hf_tokenizer
        from megatron.tokenizer.encoder import FastEncoder, LibraryEncoder, build_fast_bpe

        train_tokenizer(folder)
        tokenizer = load_hf_tokenizer(str(folder))
        self.folder, self.library = folder, tokenizer.inner
        fast = FastEncoder(build_fast_bpe(tokenizer)[0])
        # a compressed file is a stream without a known length, and takes other code than a plain one
        self.sides = {
            "C++ file": ("in.jsonl", fast), "C++ stream": ("in.jsonl.gz", fast),
            "Python": ("in.jsonl", LibraryEncoder(tokenizer)),
        }  # fmt: skip
        self.settings = EncodeSettings(("text",), tokenizer.eod_id, "uint16", True)
        (folder / "shards").mkdir()
        self.units = UnitFolder(folder / "shards", self.settings)

    def make(self, rng: random.Random) -> Files:
        """Return a block of mutated lines."""
        lines = (mutate_line(rng, generate_line(rng)) for _ in range(BATCH_LINES))
        # a newline inside a line would make two of it, and the batch would not have BATCH_LINES inputs
        return {"in.jsonl": b"\n".join(line.replace(b"\n", b" ") for line in lines)}

    def passes(self, files: Files) -> int:
        """Return the number of lines that begin like a JSON object."""
        return sum(line.strip()[:1] == b"{" for line in files["in.jsonl"].split(b"\n"))

    def read(self, files: Files) -> Mapping[str, int]:
        """Compare all three ways with the reference."""
        content = files["in.jsonl"]
        (self.folder / "in.jsonl").write_bytes(content)
        (self.folder / "in.jsonl.gz").write_bytes(gzip.compress(content, 1))
        # blank lines are skipped but counted: i is the number of the line in the file, from 0
        texts = [(i, reference_text(line)) for i, line in enumerate(content.split(b"\n")) if line.strip()]
        good = [text for _, text in texts if text is not None]
        bad = [i for i, text in texts if text is None]
        expected = [[*encoding.ids, self.settings.eod] for encoding in self.library.encode_batch(good)]
        for side, (name, encoder) in self.sides.items():
            ids, rejected = self._encode_file(name, encoder)
            if rejected != bad:
                raise WrongAnswerError(f"{side}: rejected lines {rejected}, expected {bad}")
            if ids != expected:
                rows = enumerate(zip_longest(good, ids, expected))
                raise WrongAnswerError(
                    f"{side}: text, got, expected: {next(r for r in rows if r[1][1] != r[1][2])}"
                )
        return {"accepted": BATCH_LINES - len(bad), "refused": len(bad)}

    def _encode_file(self, name: str, encoder: Any) -> tuple[list[list[int]], list[int]]:
        from megatron.text.encode import encode_piece
        from megatron.text.text_readers import InputPiece

        path, unit = self.folder / name, self.units.path(0)
        done = encode_piece(InputPiece(path, 0, path.stat().st_size), unit, self.settings, encoder)
        if done.error or done.damage:
            raise WrongAnswerError(f"{name}: got {done.error or done.damage}, expected rejected lines")
        lengths = self.units.read_lengths(0, 0)
        # lengths [3, 1, 2] cut after 3, 4 and 6: three documents and an empty rest, which [:-1] drops
        ids = np.split(np.fromfile(unit.with_suffix(".0.ids"), "<u2"), np.cumsum(lengths))[:-1]
        return [row.tolist() for row in ids], [reject["line"] for reject in done.rejects]


def train_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE tokenizer of 400 ids."""
    from megatron.tokenizer.train_bpe import train_bpe

    train_bpe([" ".join(WORDS[:7]) + string.printable] * 30, 400, folder)


def write_tar(path: Path, n: int = 4) -> None:
    """Write a WebDataset of texts, each with JSON metadata."""
    # USTAR: one header of 512 bytes for each member, without the extension headers of the default format
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for i in range(n):
            for name, content in ((f"{i:03}.txt", f"text {i}"), (f"{i:03}.json", json.dumps({"stars": i}))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))


def mutate_tar(rng: random.Random, content: bytes) -> bytes:
    """Mutate a header field and update its checksum in two of three cases, else mutate bytes."""
    if rng.random() < 0.33:
        return mutate_bytes(rng, content)
    data = bytearray(content)
    # a block is a header, content or the zeros at the end: 8 of the 20 blocks of `write_tar` are headers
    at = 512 * rng.randrange(max(1, len(data) // 512))
    # (offset, bytes) of name, mode, uid, size, mtime, type, link, magic, version, owner and prefix
    # the size is there twice, as it determines where the next header is
    begin, n = rng.choice(((0, 100), (100, 8), (108, 8), (124, 12), (124, 12), (136, 12), (156, 1),
    (157, 100),
                           (257, 6), (263, 2), (265, 32), (345, 155)))  # fmt: skip
    # octal digits; base-256 numbers, which begin with the byte 80; signs; paths out of the folder; type
    # letters
    field = rng.choice((
        b"0" * (n - 1), b"7" * (n - 1), b"\x80" + b"\xff" * (n - 1), b"\x80" + bytes(max(0,
        n - 2)) + b"\x09", b"-1", b"",
        b"../../x.txt", b"/etc/x.txt", b"\xff\xfe", b"001.txt", b"x", *b"1 2 5 6 7 L K x g S V".split(),
    ))  # fmt: skip
    data[at + begin : at + begin + n] = field[:n].ljust(n, b"\0")
    # the checksum is the sum of the header's bytes with its own field as blanks
    data[at + 148 : at + 156] = b"        "
    data[at + 148 : at + 156] = f"{sum(data[at : at + 512]):06o}\0 ".encode()
    return bytes(data)


def mutate_packed(pack: Any, lines: bytes) -> Any:
    """Return a mutator that changes the content of a compressed file in half of the cases, else its bytes."""

    # Damage of the compressed bytes ends in the decompressor. Damage before the compression reaches the
    # reader of lines behind it.
    def mutate(rng: random.Random, content: bytes) -> bytes:
        if rng.random() < 0.5:
            return pack(mutate_json_lines(rng, lines))
        return mutate_bytes(rng, content)

    return mutate


def open_packed(folder: Path) -> FileCase:
    """Open compressed and columnar files, encoded as in preprocessing."""
    import zstandard

    from megatron.text.encode import encode_piece
    from megatron.text.text_readers import InputPiece, write_parquet_columns
    from megatron.text.units import EncodeSettings
    from megatron.tokenizer.bpe import load_hf_tokenizer
    from megatron.tokenizer.encoder import FastEncoder, build_fast_bpe

    train_tokenizer(folder)
    encoder = FastEncoder(build_fast_bpe(load_hf_tokenizer(str(folder)))[0])
    lines = b"".join(json.dumps({"text": word}).encode() + b"\n" for word in WORDS)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines))
    write_parquet_columns(folder / "a.parquet", {"text": list(WORDS), "n": np.arange(len(WORDS))})
    (folder / "shards").mkdir()
    settings = EncodeSettings(("text",), 0, "uint16", False)
    # two streams: content after the first one must not be dropped
    (folder / "a.jsonl.bz2").write_bytes(bz2.compress(lines) + bz2.compress(lines))
    (folder / "a.jsonl.xz").write_bytes(lzma.compress(lines) + lzma.compress(lines))
    names = ("a.jsonl.gz", "a.jsonl.zst", "a.jsonl.bz2", "a.jsonl.xz", "a.parquet")

    def read() -> None:
        for name in names:
            path = folder / name
            # only the mutated file is read
            if path.read_bytes() == case[name]:
                continue
            done = encode_piece(
                InputPiece(path, 0, path.stat().st_size), folder / "shards" / "0.unit", settings, encoder
            )
            if done.error and (str(path) not in done.error or "\n" in done.error):
                raise WrongAnswerError(f"got {done.error!r}, expected one line that names {path}")
            if done.error:
                raise RefusedError(done.error)

    case = {name: (folder / name).read_bytes() for name in names}
    mutators = {
        "a.jsonl.gz": mutate_packed(gzip.compress, lines),
        "a.jsonl.zst": mutate_packed(zstandard.compress, lines),
        "a.jsonl.bz2": mutate_packed(bz2.compress, lines),
        "a.jsonl.xz": mutate_packed(lzma.compress, lines),
        "a.parquet": mutate_bytes,
    }
    return FileCase(folder, mutators, read)


TARGETS = (FuzzTarget("jsonl", 200, Lines), FuzzTarget("packed text", 3, open_packed))
