"""The dry run is near the truth for every format, writes nothing, and the line of progress counts files."""

import gzip
import io
import json
import random
import re
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from megatron.text.sources import Part

from megatron.terminal import format_si
from megatron.text import dry_run
from megatron.text import preprocess as module
from megatron.text.dry_run import estimate_job
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.kinds import TokenizerSpec
from megatron.tokenizer.train_bpe import train_bpe

NUMBERS = TokenizerSpec("NullTokenizer", vocab_size=1000)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["red fish blue fish"] * 5, 262, folder)
    return str(folder)


def make_texts(n: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(str(rng.randint(0, 999)) for _ in range(rng.randint(1, 60))) for _ in range(n)]


def write_files(folder: Path, kind: str) -> str:
    """Write 12 files of one kind; return their pattern."""
    folder.mkdir()
    for i in range(6):
        texts = make_texts(700)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        if kind == "parquet":
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table({"text": texts}), folder / f"{i}.parquet")
        else:
            (folder / f"{i}.{kind}").write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    return str(folder / "*")


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_the_estimate_is_near_the_result_and_nothing_is_written(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, kind: str, is_fast: bool
) -> None:
    monkeypatch.setattr(dry_run, "SAMPLE_BYTES", 30_000)
    spec, words = tokenizer if is_fast else NUMBERS, [write_files(tmp_path / "in", kind)]
    for part in (None, Part(2, 3)):
        options = PreprocessOptions(append_eod=True, part=part, n_workers=2, quiet=True)
        estimate = estimate_job(words, tmp_path / "new" / "out", spec, options)
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["in"]
        output = preprocess(words, tmp_path / "out", spec, options).outputs[0]
        assert estimate.n_tokens == pytest.approx(output.n_tokens, rel=0.1)
        meta = json.loads(Path(f"{output.prefix}.json").read_text())
        assert estimate.n_files == len(meta["sources"])
        assert estimate.n_bytes == pytest.approx(sum(source["bytes"] for source in meta["sources"]), abs=2)
        written = sum(Path(f"{output.prefix}{end}").stat().st_size for end in (".bin", ".idx"))
        # the estimate has room for shards that are not joined yet, here as large as the output
        assert written < estimate.disk_bytes < 2.5 * written
        for path in tmp_path.glob("out*"):
            path.unlink()
    assert f"{estimate.n_files:,} files" in str(estimate) and "B/s; 2 workers count" in str(estimate)


def test_a_disk_that_is_too_small_is_a_warning(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda _: Usage(10**6, 10**6 - 999, 999))
    words = [write_files(tmp_path / "in", "jsonl")]
    estimate_job(words, tmp_path / "out", tokenizer, PreprocessOptions())
    assert re.search(r"the disk has 999B free, and the job needs about \S+MB\. Make room", caplog.text)


def test_the_sample_ends_at_its_time_limit_and_max_tokens_limits_the_estimate(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [write_files(tmp_path / "in", "jsonl.gz")]
    whole = estimate_job(words, tmp_path / "out", tokenizer, PreprocessOptions())
    some = estimate_job(words, tmp_path / "out", tokenizer, PreprocessOptions(max_tokens=1000))
    assert some.n_tokens == pytest.approx(1000, abs=2) and some.n_bytes < whole.n_bytes / 10
    monkeypatch.setattr(dry_run, "SAMPLE_S", 0.0)
    limited = estimate_job(words, tmp_path / "out", NUMBERS, PreprocessOptions())
    assert len(limited.sample.files) <= 1


def test_an_input_without_documents_is_an_error_and_an_empty_part_is_not(
    tmp_path: Path, tokenizer: str
) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n\n")
    with pytest.raises(ValueError, match="got no document in a sample of the input"):
        estimate_job([str(tmp_path / "in.jsonl")], tmp_path / "out", tokenizer, PreprocessOptions())
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n'))
    options = PreprocessOptions(part=Part(1, 3))
    empty = estimate_job([str(tmp_path / "in.jsonl.gz")], tmp_path / "out", tokenizer, options)
    assert (empty.n_files, empty.n_bytes, empty.n_tokens) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
def test_a_job_has_one_line_of_progress_with_bytes_files_and_time_left(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    words = [write_files(tmp_path / "in", kind)]
    monkeypatch.setattr("megatron.terminal.PLAIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    preprocess(words, tmp_path / "out", tokenizer, PreprocessOptions(n_workers=2, part=Part(1, 2)))
    lines = [line for line in log.getvalue().splitlines() if line.startswith("tokenising part 1/2: ")]
    middle = lines[len(lines) // 2]
    assert re.search(r": \d+%, .*B/s, \d:\d\d:\d\d left, \d/3 files, [\d,]+ documents", middle)
    total = sum(path.stat().st_size for path in sorted((tmp_path / "in").iterdir())[:3])
    assert f"/{format_si(total)}B, " in lines[-1] and lines[-1].startswith("tokenising part 1/2: 100%, ")
    assert " 3/3 files, 2,100 documents, " in lines[-1]
