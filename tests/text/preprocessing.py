"""One corpus in all kinds of files, and calls of the preprocessing of it."""

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

from megatron.text.join import PreprocessResult
from megatron.text.preprocess import PreprocessOptions, preprocess

WORDS = ["red", "fish", "blue ", "\u00e9t\u00e9", "\U0001f41f", "12", "\n", "<|endoftext|>", ""]
RNG = random.Random(0)
RECORDS = [
    {"text": " ".join(RNG.choices(WORDS, k=RNG.randrange(30))), "url": f"fish {i}"} for i in range(900)
]
TEXTS = [record["text"] for record in RECORDS]
LINES = [json.dumps(record, ensure_ascii=i % 2 == 0) for i, record in enumerate(RECORDS)]
PLAIN = "".join(f"{line}\n" for line in LINES).encode()
CUT = len("".join(f"{line}\n" for line in LINES[:300]).encode())


def pack_table(name: str) -> bytes:
    table, sink = pyarrow.Table.from_pylist(RECORDS), pyarrow.BufferOutputStream()
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, sink, row_group_size=100)
    else:
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, 200)
    return sink.getvalue().to_pybytes()


FILES = {  # of the same documents; packed files of several streams
    "a.jsonl": PLAIN,
    "a.json.gz": gzip.compress(PLAIN[:CUT]) + gzip.compress(PLAIN[CUT:]),
    "a.jsonl.zst": zstandard.compress(PLAIN[:CUT]) + zstandard.compress(PLAIN[CUT:]),
    "a.jsonl.bz2": bz2.compress(PLAIN[:CUT]) + bz2.compress(PLAIN[CUT:]),
    "a.jsonl.xz": lzma.compress(PLAIN[:CUT]) + lzma.compress(PLAIN[CUT:]),
    "a.parquet": pack_table("a.parquet"),
    "a.arrow": pack_table("a.arrow"),
}


def run(words: Any, prefix: Path, tokenizer: Any, **options: Any) -> PreprocessResult:
    """Preprocess without a progress bar. `words`: an input, or a list of inputs."""
    inputs = [str(word) for word in (words if isinstance(words, list) else [words])]
    return preprocess(inputs, prefix, tokenizer, PreprocessOptions(quiet=True, **options))
