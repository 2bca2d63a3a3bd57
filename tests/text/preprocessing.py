"""One corpus in all kinds of files, and calls of the preprocessing of it."""

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from megatron.text.join import PreprocessResult
from megatron.text.preprocess import PreprocessOptions, preprocess
from tests.datasets import write_dataset

WORDS = ["red", "fish", "blue ", "\u00e9t\u00e9", "\U0001f41f", "12", "\n", "<|endoftext|>", ""]
RNG = random.Random(0)
META = {"tokenizer": {"n_tokens": 500, "sha256": "same", "eod_id": 0}, "append_eod": False}
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


FILES = {  # the same documents in each; packed files of several streams
    "a.jsonl": PLAIN,
    "a.json.gz": gzip.compress(PLAIN[:CUT]) + gzip.compress(PLAIN[CUT:]),
    "a.jsonl.zst": zstandard.compress(PLAIN[:CUT]) + zstandard.compress(PLAIN[CUT:]),
    "a.jsonl.bz2": bz2.compress(PLAIN[:CUT]) + bz2.compress(PLAIN[CUT:]),
    "a.jsonl.xz": lzma.compress(PLAIN[:CUT]) + lzma.compress(PLAIN[CUT:]),
    "a.parquet": pack_table("a.parquet"),
    "a.arrow": pack_table("a.arrow"),
}


def write_parts(folder: Path, n: int) -> list[str]:
    """Write datasets of four documents, of which the third is empty; return their prefixes."""
    prefixes = []
    for i in range(n):
        rng = np.random.default_rng(i)
        documents = [rng.integers(0, 500, n_tokens) for n_tokens in rng.multinomial(300, [0.2, 0.3, 0, 0.5])]
        prefixes.append(write_dataset(folder / f"part-{i}_text_document", documents, META))
    return prefixes


def run(words: Any, prefix: Path, tokenizer: Any, **options: Any) -> PreprocessResult:
    """Preprocess without a progress bar. `words`: an input, or a list of inputs."""
    inputs = [str(word) for word in (words if isinstance(words, list) else [words])]
    return preprocess(inputs, prefix, tokenizer, PreprocessOptions(quiet=True, **options))
