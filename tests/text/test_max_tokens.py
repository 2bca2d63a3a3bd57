"""--max-tokens: input after the end has no effect, whatever the timing and the format of the input."""

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.text import preprocess as module
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.text.text_readers import InputPiece
from megatron.tokenizer.kinds import TokenizerSpec

NUMBERS = TokenizerSpec("NullTokenizer", vocab_size=1000)
BAD = '{"body": 1}'


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 200)


def write_lines(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def make_documents(n: int) -> list[str]:
    """Return n JSON lines; document i has 1 + i % 5 tokens."""
    return [json.dumps({"text": " ".join([str(i)] * (1 + i % 5))}) for i in range(n)]


def read_sidecar_file(prefix: Path) -> dict[str, object]:
    return json.loads(Path(f"{prefix}_text_document.json").read_text())


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> str:
    from megatron.tokenizer.train_bpe import train_bpe

    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["1 2 3 4 5"], 257, folder)
    return str(folder)


@pytest.mark.parametrize("later_first", [False, True])
@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_bad_line_after_the_end_neither_fails_nor_is_rejected(
    tmp_path: Path, fast: str, monkeypatch: pytest.MonkeyPatch, n_workers: int, later_first: bool
) -> None:
    lines = [json.dumps({"text": "x" * 9}) for _ in range(40)]  # 9 tokens each
    source = write_lines(tmp_path / "in.jsonl", [*lines[:10], BAD, *lines[10:20], BAD, *lines[20:]])
    encode = module.encode_piece

    def slow_at_first(piece: InputPiece, number: int, *rest: object) -> object:
        if later_first and number == 0:
            time.sleep(0.3)
        return encode(piece, number, *rest)

    monkeypatch.setattr(module, "encode_piece", slow_at_first)
    result = preprocess(
        [source], tmp_path / "out", fast, PreprocessOptions(max_tokens=90, n_workers=n_workers)
    )
    assert (result.outputs[0].n_documents, result.outputs[0].n_tokens, result.n_rejected) == (10, 90, 0)
    with pytest.raises(ValueError, match=r"in.jsonl, line 11: no key 'text'"):
        preprocess([source], tmp_path / "more", fast, PreprocessOptions(max_tokens=91, n_workers=n_workers))
    assert not list(tmp_path.glob("*more*"))
    options = PreprocessOptions(max_tokens=91, n_workers=n_workers, skip_bad_lines=True)
    result = preprocess([source], tmp_path / "skip", fast, options)
    assert (result.outputs[0].n_documents, result.n_rejected) == (11, 1)
    assert result.rejects is not None
    assert [json.loads(line)["line"] for line in result.rejects.read_text().splitlines()] == [11]
    assert read_sidecar_file(tmp_path / "skip")["rejected_lines"] == 1


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_the_first_of_several_bad_lines_is_reported_whatever_the_timing(
    tmp_path: Path, fast: str, monkeypatch: pytest.MonkeyPatch, n_workers: int
) -> None:
    lines = [json.dumps({"text": "x" * 9}) for _ in range(40)]
    source = write_lines(tmp_path / "in.jsonl", [*lines[:3], BAD, *lines[3:], BAD])
    encode = module.encode_piece

    def slow_at_first(piece: InputPiece, number: int, *rest: object) -> object:
        if number == 0:
            time.sleep(0.2)
        return encode(piece, number, *rest)

    monkeypatch.setattr(module, "encode_piece", slow_at_first)
    with pytest.raises(ValueError, match=r"in.jsonl, line 4: "):
        preprocess([source], tmp_path / "out", fast, PreprocessOptions(n_workers=n_workers))
    assert not list(tmp_path.glob("*out*"))


def test_the_sidecar_lists_the_sources_that_were_read_and_how_much_of_the_last(
    tmp_path: Path, fast: str
) -> None:
    lines = [json.dumps({"text": "x" * 9}) for _ in range(40)]
    names = [write_lines(tmp_path / f"{name}.jsonl", lines) for name in "abc"]
    for n_workers in (1, 3):
        preprocess(names, tmp_path / "out", fast, PreprocessOptions(max_tokens=9 * 50, n_workers=n_workers))
        meta = read_sidecar_file(tmp_path / "out")
        a, b = meta["sources"]  # type: ignore[misc]
        assert (a["path"], a["documents_read"], "of_bytes" in a) == ("a.jsonl", 40, False)
        assert (b["path"], b["documents_read"], b["of_bytes"]) == (
            "b.jsonl",
            10,
            Path(names[1]).stat().st_size,
        )
        assert b["bytes"] < b["of_bytes"]
        for suffix in ("bin", "idx", "json"):
            Path(f"{tmp_path}/out_text_document.{suffix}").unlink()


@pytest.mark.parametrize("kind", ["gz", "parquet", "numbers"])
def test_a_compressed_file_is_read_only_as_far_as_needed(
    tmp_path: Path, fast: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.text.text_readers.READ_BYTES", 1000)
    monkeypatch.setattr("megatron.text.encode_piece.BATCH_DOCUMENTS", 16)
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 999, 30))) for _ in range(3000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = tmp_path / ("in.parquet" if kind == "parquet" else "in.jsonl.gz")
    if kind == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": [*texts, None]}), path)  # the last row would be refused
    else:
        path.write_bytes(gzip.compress(lines)[:-100])  # truncated
    tokenizer = NUMBERS if kind == "numbers" else fast
    result = preprocess([str(path)], tmp_path / "out", tokenizer, PreprocessOptions(max_tokens=3000))
    tokens = IndexedTokens(tmp_path / "out_text_document")
    assert 3000 <= result.outputs[0].n_tokens == tokens.n_tokens
    assert tokens.n_tokens - tokens.get_document(tokens.n_documents - 1).size < 3000
    with pytest.raises(ValueError, match="got damaged content|row 3001"):
        preprocess([str(path)], tmp_path / "all", tokenizer, PreprocessOptions())


def test_an_endless_pipe_is_read_only_as_far_as_needed(root: Path, tmp_path: Path, fast: str) -> None:
    tool = root / "tools" / "preprocess_data_many_cores.py"
    words = ["--input", "-", "--tokenizer-model", fast, "--max-tokens", "10K", "--output-prefix", "x"]
    with subprocess.Popen(["yes", '{"text": "fish fish"}'], stdout=subprocess.PIPE) as endless:
        done = subprocess.run(
            [sys.executable, str(tool), *words, "--root", str(tmp_path)],
            stdin=endless.stdout, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        endless.kill()
    assert done.returncode == 0, done.stderr
    assert "10,008 tokens per epoch, 1,112 documents" in done.stdout  # 9 tokens each


def test_fewer_tokens_than_requested_give_a_warning(
    tmp_path: Path, fast: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_lines(tmp_path / "in.jsonl", make_documents(5))
    preprocess([source], tmp_path / "out", NUMBERS, PreprocessOptions(max_tokens=15))
    assert "fewer than" not in caplog.text
    preprocess([source], tmp_path / "more", NUMBERS, PreprocessOptions(max_tokens=16))
    assert "in.jsonl: got fewer than the requested 16 tokens; all are used" in caplog.text
