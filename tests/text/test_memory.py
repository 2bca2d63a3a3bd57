"""Memory of preprocessing grows neither with a document nor with a file, in any format."""

import gzip
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux reports anonymous memory of a process"
)
WORDS = b"one fish two \\n fish "
MORE = [(WORDS, ["text", "n"], False), ("\u4e2d\u6587".encode(), ["text"], False)]
# The system's peak also counts pages of files, and the memory of pytest before the child called exec.
WATCHED = """
import pathlib, re, runpy, sys, threading, time
sys.argv, peak = sys.argv[1:], 0
def watch():
    global peak
    while True:
        status = pathlib.Path("/proc/self/status").read_text()
        peak = max(peak, int(re.search(r"RssAnon:\\s+(\\d+) kB", status)[1]))
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
try: runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end: assert not end.code
print(peak)
"""


def peak_mb(root: Path, tokenizer: str, source: Path, *words: str) -> float:
    """Return the peak of anonymous memory during tokenisation of a file, MB."""
    tool = root / "tools" / "preprocess_data_many_cores.py"
    command = [sys.executable, "-c", WATCHED, tool, "--input", source, "--output-prefix", "out", "--root",
               source.parent / "tokens", "--tokenizer-model", tokenizer, "--overwrite",
               *words]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return int(done.stdout.split()[-1]) / 1024


@pytest.mark.parametrize(
    ("part", "keys", "packed"),
    [(WORDS, ["text"], True), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=["words in gzip", "words of one key of two", "one word"],
)
def test_memory_is_constant_while_a_document_grows(
    root: Path, tmp_path: Path, tokenizer: str, part: bytes, packed: bool, keys: list[str]
) -> None:
    def peak(n_bytes: int) -> float:
        line = b'{"n": "1", "text": "' + part * (n_bytes // len(part)) + b'"}\n'
        source = tmp_path / ("in.jsonl.gz" if packed else "in.jsonl")
        source.write_bytes(gzip.compress(line, 1) if packed else line)
        return peak_mb(root, tokenizer, source, "--json-keys", *keys)

    assert peak(60_000_000) < peak(1000) + 30


@pytest.mark.slow
def test_memory_is_constant_while_a_columnar_file_grows(root: Path, tmp_path: Path, tokenizer: str) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for kind in ("parquet", "arrow"):
        peaks = []
        for n_rows in (5_000, 200_000):  # the second has 90 MB of text
            texts = [str(number) * 50 for number in np.random.default_rng(0).integers(10**9, size=n_rows)]
            table, source = pyarrow.table({"text": texts}), tmp_path / f"in.{kind}"
            if kind == "parquet":
                parquet.write_table(table, source, row_group_size=n_rows)  # a single row group
            else:
                with pyarrow.ipc.new_stream(source, table.schema) as stream:
                    stream.write_table(table, max_chunksize=1000)  # as datasets does
            peaks.append(peak_mb(root, tokenizer, source))
        assert peaks[1] < peaks[0] + 30, kind
