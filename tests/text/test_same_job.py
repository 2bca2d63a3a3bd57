"""The same command again: during a run, after its end, after a full disk or a kill during renames."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.data import indexed_writer
from megatron.io import open_exclusive
from megatron.text import preprocess as module
from megatron.text.merge import merge_datasets
from megatron.text.preprocess import PreprocessOptions, PreprocessResult, preprocess
from megatron.tokenizer.train_bpe import train_bpe

TEXTS = [f"document {i}: " + "red fish blue fish " * (i % 7) for i in range(3000)]
SUFFIXES = ("bin", "idx", "json")
BAD = "no JSON"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 270, folder)
    return str(folder)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text, "other": text[:9]}) + "\n" for text in TEXTS))
    return path


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 40_000)


def read_outputs(prefix: Path, key: str = "text") -> list[bytes]:
    return [Path(f"{prefix}_{key}_document.{suffix}").read_bytes() for suffix in SUFFIXES]


def summarize_result(totals: PreprocessResult) -> tuple[object, ...]:
    return totals.outputs, totals.n_rejected, totals.rejects


def test_a_finished_job_is_reported_and_not_repeated(
    tmp_path: Path,
    source: Path,
    tokenizer: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with source.open("a") as file:
        file.write(BAD + "\n")
    options = PreprocessOptions(keys=("text", "other"), skip_bad_lines=True, append_eod=True)
    first = summarize_result(preprocess([str(source)], tmp_path / "out", tokenizer, options))
    before = read_outputs(tmp_path / "out"), read_outputs(tmp_path / "out", "other")
    with monkeypatch.context() as patched:
        patched.setattr(module, "encode_piece", None)  # a call would fail
        assert summarize_result(preprocess([str(source)], tmp_path / "out", tokenizer, options)) == first
    assert "exists already" in caplog.text
    assert (read_outputs(tmp_path / "out"), read_outputs(tmp_path / "out", "other")) == before
    assert not (tmp_path / ".out.shards").exists()


@pytest.mark.parametrize("change", ["input", "option", "bin", "idx", "rejects", "key"])
def test_changed_inputs_options_or_outputs_are_processed_again(
    tmp_path: Path, source: Path, tokenizer: str, change: str
) -> None:
    with source.open("a") as file:
        file.write(BAD + "\n")
    options = PreprocessOptions(skip_bad_lines=True)
    preprocess([str(source)], tmp_path / "out", tokenizer, options)
    if change == "input":
        source.write_text(source.read_text().replace("red fish", "new fish"))  # same size
    elif change == "option":
        options = PreprocessOptions(skip_bad_lines=True, append_eod=True)
    elif change == "key":
        options = PreprocessOptions(skip_bad_lines=True, keys=("other",))
    elif change == "rejects":
        (tmp_path / "out.rejects.jsonl").unlink()
    else:
        with Path(f"{tmp_path}/out_text_document.{change}").open("ab") as file:
            file.write(b"more")
    if change in ("input", "option"):
        before = read_outputs(tmp_path / "out")
        with pytest.raises(ValueError, match="out_text_document.bin: exists already, from other files"):
            preprocess([str(source)], tmp_path / "out", tokenizer, options)
        assert read_outputs(tmp_path / "out") == before
        assert not (tmp_path / ".out.shards").exists()
        options = replace(options, overwrite=True)
    again = preprocess([str(source)], tmp_path / "out", tokenizer, options)
    fresh = preprocess([str(source)], tmp_path / "fresh", tokenizer, options)
    assert (again.n_rejected, again.outputs[0].n_tokens) == (1, fresh.outputs[0].n_tokens)
    assert read_outputs(tmp_path / "out", options.keys[0]) == read_outputs(
        tmp_path / "fresh", options.keys[0]
    )
    assert (tmp_path / "out.rejects.jsonl").read_text() == (tmp_path / "fresh.rejects.jsonl").read_text()


def test_a_second_process_with_the_same_output_is_refused(
    tmp_path: Path, source: Path, tokenizer: str
) -> None:
    (tmp_path / ".out.shards").mkdir()
    with open_exclusive(tmp_path / ".out.shards" / ".lock"):
        with pytest.raises(ValueError, match="out: in use by another process"):
            preprocess([str(source)], tmp_path / "out", tokenizer, PreprocessOptions())
        assert not list(tmp_path.glob("out*"))
    preprocess([str(source)], tmp_path / "out", tokenizer, PreprocessOptions())
    (tmp_path / ".joined.merge").mkdir()
    with open_exclusive(tmp_path / ".joined.merge" / ".lock"):
        with pytest.raises(ValueError, match="joined: in use by another process"):
            merge_datasets([str(tmp_path / "out_text_document")], tmp_path / "joined")
        assert (tmp_path / ".joined.merge" / ".lock").exists()  # it belongs to the other process
    merge_datasets([str(tmp_path / "out_text_document")], tmp_path / "joined")
    assert (tmp_path / "joined.bin").read_bytes() == read_outputs(tmp_path / "out")[0]


def test_a_file_that_its_owner_renames_during_locking_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.partial"
    path.write_text("whole")
    to_rename = [path]

    def rename_first(*_: object) -> None:
        for target in to_rename:
            target.rename(tmp_path / "x")
        to_rename.clear()

    monkeypatch.setattr("fcntl.flock", rename_first)
    with open_exclusive(path) as file:
        file.write(b"other")
    assert (tmp_path / "x").read_text() == "whole"
    assert path.read_text() == "other"


def status_of_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; return its exit status. The child always ends after `work`."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(240)  # limit for a child that waits for a lock copied by the fork
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("n_renamed", range(7))
def test_after_a_kill_during_the_final_renames_the_same_call_only_renames(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, n_renamed: int
) -> None:
    options = PreprocessOptions(keys=("text", "other"))
    preprocess([str(source)], tmp_path / "whole", tokenizer, options)
    rename, renamed = Path.rename, []

    def dying(path: Path, target: Path) -> Path:
        if Path(target).name.startswith("out_"):
            renamed.append(target)
            if len(renamed) > n_renamed:
                os._exit(9)  # without cleanup, as after SIGKILL
        return rename(path, target)

    def work() -> None:
        monkeypatch.setattr(indexed_writer.Path, "rename", dying)
        preprocess([str(source)], tmp_path / "out", tokenizer, options)

    assert status_of_child(work) == (9 if n_renamed < 6 else 0)
    monkeypatch.setattr(module, "encode_piece", None)  # no piece is encoded again
    preprocess([str(source)], tmp_path / "out", tokenizer, options)
    for key in options.keys:
        assert read_outputs(tmp_path / "out", key) == read_outputs(tmp_path / "whole", key)
    assert not (tmp_path / ".out.shards").exists()


FULL_DISK = """
import resource, sys
from pathlib import Path
from megatron.text import preprocess as m
m.PIECE_BYTES = 40_000
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
m.preprocess([sys.argv[1]], Path(sys.argv[2]), sys.argv[3], m.PreprocessOptions(quiet=True))
"""


def test_a_full_disk_leaves_no_output_and_the_same_call_resumes(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = preprocess([str(source)], tmp_path / "whole", tokenizer, PreprocessOptions())
    n_bytes = 2 * totals.outputs[0].n_tokens
    words = [sys.executable, "-c", FULL_DISK, str(source), str(tmp_path / "out"), tokenizer]
    done = subprocess.run(
        [*words, str(n_bytes // 2)], capture_output=True, text=True, timeout=240, check=False
    )
    assert f"Errno {errno.EFBIG}" in done.stderr
    assert not list(tmp_path.glob("out*"))
    encode, encoded = module.encode_piece, []

    def counted(piece: object, number: int, *rest: object) -> object:
        encoded.append(number)
        return encode(piece, number, *rest)

    monkeypatch.setattr(module, "encode_piece", counted)
    preprocess([str(source)], tmp_path / "out", tokenizer, PreprocessOptions())
    assert 0 not in encoded  # perhaps no piece is: pieces are encoded while the first ones are joined
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")


def test_a_full_disk_leaves_nothing_of_a_merged_dataset(tmp_path: Path, source: Path, tokenizer: str) -> None:
    preprocess([str(source)], tmp_path / "x", tokenizer, PreprocessOptions())
    n_bytes = (tmp_path / "x_text_document.bin").stat().st_size

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes + 1,) * 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            merge_datasets([str(tmp_path / "x_text_document")] * 2, tmp_path / "joined")
        except OSError as error:
            os._exit(error.errno or 1)

    assert status_of_child(work) == errno.EFBIG
    assert not list(tmp_path.glob("joined*"))


def test_rejects_of_a_resumed_job_are_those_of_an_uninterrupted_one(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = source.read_text().splitlines()
    for i in range(2990, 0, -37):
        lines.insert(i, BAD if i % 2 else '{"text": null}')
    source.write_text("\n".join(lines))
    options = PreprocessOptions(skip_bad_lines=True)
    whole = preprocess([str(source)], tmp_path / "whole", tokenizer, options)
    take, n_taken = module.ShardJoiner.join_ready, []

    def stopping(joining: module.ShardJoiner) -> None:
        n_taken.append(1)
        if len(n_taken) == 4:
            raise KeyboardInterrupt
        take(joining)

    with monkeypatch.context() as patched:
        patched.setattr(module.ShardJoiner, "join_ready", stopping)
        with pytest.raises(KeyboardInterrupt):
            preprocess([str(source)], tmp_path / "out", tokenizer, options)
    assert not list(tmp_path.glob("out*"))
    result = preprocess([str(source)], tmp_path / "out", tokenizer, options)
    assert result.n_rejected == whole.n_rejected == 81
    assert read_outputs(tmp_path / "out") == read_outputs(tmp_path / "whole")
    assert (tmp_path / "out.rejects.jsonl").read_text() == (tmp_path / "whole.rejects.jsonl").read_text()
