"""The progress bar of preprocessing advances within a piece in any format; a piece can be interrupted."""

import gzip
import io
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.text.piece_progress import PieceProgress, StoppedError

from megatron.text import preprocess as module
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.kinds import TokenizerSpec
from megatron.tokenizer.train_bpe import train_bpe
from tests.screen import TerminalStream, render_screen

TEXTS = [f"document {i}: " + "red fish blue fish " * (i % 7) for i in range(2000)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 270, folder)
    return str(folder)


def test_the_bar_has_bytes_documents_tokens_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := TerminalStream(monkeypatch))
    with PieceProgress("tokenising", 4000, 1000, quiet=False) as progress:
        progress.update(1, 400, 2, 30)
        progress.update(2, 500, 3, 40)
        progress.update(1, 1000, 5, 75)  # totals of the piece, not increments
    (line,) = render_screen(shown.getvalue())
    assert line.startswith("tokenising ") and " 62%, 2.50k/4.00kB, " in line
    assert re.search(r"B/s, \d:\d\d:\d\d left, 8 documents, 115 tokens$", line)
    for quiet, stream in ((True, TerminalStream(monkeypatch)), (False, io.StringIO())):
        monkeypatch.setattr(sys, "stderr", stream)
        with PieceProgress("tokenising", 4000, 0, quiet) as progress:
            progress.update(1, 400, 2, 30)
        assert stream.getvalue() == ""


@pytest.mark.parametrize("by", ["fast", "library"])
@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "arrow"])
def test_a_compressed_file_reports_progress_while_it_is_read(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, kind: str, by: str
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = TEXTS if by == "fast" else ["1 2 3"] * len(TEXTS)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = tmp_path / (f"in.{kind}" if kind in ("parquet", "arrow") else f"in.jsonl.{kind}")
    table = pyarrow.table({"text": texts})
    if kind == "parquet":
        parquet.write_table(table, path)
    elif kind == "arrow":
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=100)
    else:
        pack = gzip.compress if kind == "gz" else pytest.importorskip("zstandard").compress
        path.write_bytes(pack(lines))
    monkeypatch.setattr("megatron.text.text_readers.READ_BYTES", 5000)
    updates: list[tuple[int, ...]] = []
    update = PieceProgress.update

    def record_update(progress: PieceProgress, piece: int, *counts: int) -> None:
        updates.append(counts)
        update(progress, piece, *counts)

    monkeypatch.setattr(PieceProgress, "update", record_update)
    spec = tokenizer if by == "fast" else TokenizerSpec("NullTokenizer", vocab_size=9)
    totals = preprocess([str(path)], tmp_path / "out", spec, PreprocessOptions())
    assert len(updates) > 5
    assert updates == sorted(updates)
    assert updates[-1] == (path.stat().st_size, len(TEXTS), totals.outputs[0].n_tokens)
    assert updates[0][0] > 0 or kind == "gz"  # gzip reads ahead in its own blocks


@pytest.mark.parametrize("endless_read", ["iter_piece_blocks", "iter_blocks"])  # the second seeks damage
def test_an_endless_piece_is_interrupted_when_the_work_is_stopped(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, endless_read: str
) -> None:
    begun = threading.Event()

    def endless(*_: object) -> Iterator[bytes]:
        for _ in itertools.count():
            yield b'{"text": "fish"}\n'
            begun.set()

    def interrupted(_: object) -> None:
        assert begun.wait(240)
        raise KeyboardInterrupt

    monkeypatch.setattr(f"megatron.text.encode_piece.{endless_read}", endless)
    monkeypatch.setattr(module, "as_completed", interrupted)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(KeyboardInterrupt):
        preprocess([str(tmp_path / "in.jsonl.gz")], tmp_path / "out", tokenizer, PreprocessOptions())
    assert not list(tmp_path.glob("out*"))
    with PieceProgress("x", None, 0, quiet=True) as progress:
        progress.stop()
        with pytest.raises(StoppedError):
            progress.update(0, 0, 0, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_waiting_for_a_silent_pipe_can_be_stopped(
    root: Path, tmp_path: Path, tokenizer: str, number: signal.Signals
) -> None:
    tool = root / "tools" / "preprocess_data_many_cores.py"
    words = ["--input", "-", "--tokenizer-model", tokenizer, "--output-prefix", "x", "--root", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, str(tool), *words], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b'{"text": "fish"}\n')
        process.stdin.flush()
        end = time.monotonic() + 240
        while not (tmp_path / ".x.shards" / "plan.json").exists():
            assert time.monotonic() < end
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(number)
        assert process.wait(240) == 75
        assert b"stopped; run the same command again" in process.stderr.read()
