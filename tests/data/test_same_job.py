"""The same command again: while it runs, when it is done, after a full disk or a kill in its last moment."""

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
from megatron.data import preprocess as module
from megatron.data.merge import merge
from megatron.data.preprocess import Options, Totals, preprocess
from megatron.run_dir import open_alone
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


def held(prefix: Path, key: str = "text") -> list[bytes]:
    return [Path(f"{prefix}_{key}_document.{suffix}").read_bytes() for suffix in SUFFIXES]


def told(totals: Totals) -> tuple[object, ...]:
    return totals.outputs, totals.n_rejected, totals.rejects


def test_a_job_that_is_done_is_said_to_be_and_not_done_again(
    tmp_path: Path,
    source: Path,
    tokenizer: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with source.open("a") as file:
        file.write(BAD + "\n")
    options = Options(keys=("text", "other"), skip_bad_lines=True, append_eod=True)
    first = told(preprocess([str(source)], tmp_path / "out", tokenizer, options))
    before = held(tmp_path / "out"), held(tmp_path / "out", "other")
    with monkeypatch.context() as patched:
        patched.setattr(module, "encode_piece", None)  # whoever called it would fail
        assert told(preprocess([str(source)], tmp_path / "out", tokenizer, options)) == first
    assert "is there already" in caplog.text
    assert (held(tmp_path / "out"), held(tmp_path / "out", "other")) == before
    assert not (tmp_path / ".out.shards").exists()


@pytest.mark.parametrize("change", ["input", "option", "bin", "idx", "rejects", "key"])
def test_what_differs_is_made_anew(tmp_path: Path, source: Path, tokenizer: str, change: str) -> None:
    with source.open("a") as file:
        file.write(BAD + "\n")
    options = Options(skip_bad_lines=True)
    preprocess([str(source)], tmp_path / "out", tokenizer, options)
    if change == "input":
        source.write_text(source.read_text().replace("red fish", "new fish"))  # as long as before
    elif change == "option":
        options = Options(skip_bad_lines=True, append_eod=True)
    elif change == "key":
        options = Options(skip_bad_lines=True, keys=("other",))
    elif change == "rejects":
        (tmp_path / "out.rejects.jsonl").unlink()
    else:
        with Path(f"{tmp_path}/out_text_document.{change}").open("ab") as file:
            file.write(b"more")
    if change in ("input", "option"):
        before = held(tmp_path / "out")
        with pytest.raises(ValueError, match="out_text_document.bin: is there already, made of other files"):
            preprocess([str(source)], tmp_path / "out", tokenizer, options)
        assert held(tmp_path / "out") == before
        assert not (tmp_path / ".out.shards").exists()
        options = replace(options, overwrite=True)
    again = preprocess([str(source)], tmp_path / "out", tokenizer, options)
    fresh = preprocess([str(source)], tmp_path / "fresh", tokenizer, options)
    assert (again.n_rejected, again.outputs[0].n_tokens) == (1, fresh.outputs[0].n_tokens)
    assert held(tmp_path / "out", options.keys[0]) == held(tmp_path / "fresh", options.keys[0])
    assert (tmp_path / "out.rejects.jsonl").read_text() == (tmp_path / "fresh.rejects.jsonl").read_text()


def test_a_second_process_with_the_same_output_is_refused(
    tmp_path: Path, source: Path, tokenizer: str
) -> None:
    (tmp_path / ".out.shards").mkdir()
    with open_alone(tmp_path / ".out.shards" / ".lock"):
        with pytest.raises(ValueError, match="out: another process is at work on it"):
            preprocess([str(source)], tmp_path / "out", tokenizer, Options())
        assert not list(tmp_path.glob("out*"))
    preprocess([str(source)], tmp_path / "out", tokenizer, Options())
    with open_alone(tmp_path / "joined.bin.partial"):
        with pytest.raises(ValueError, match="joined: another process is at work on it"):
            merge([str(tmp_path / "out_text_document")], tmp_path / "joined")
        assert (tmp_path / "joined.bin.partial").exists()  # it is the other's
    merge([str(tmp_path / "out_text_document")], tmp_path / "joined")
    assert (tmp_path / "joined.bin").read_bytes() == held(tmp_path / "out")[0]


def test_a_file_that_its_holder_renames_meanwhile_is_not_taken_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.partial"
    path.write_text("whole")
    to_rename = [path]

    def rename_first(*_: object) -> None:
        for one in to_rename:
            one.rename(tmp_path / "x")
        to_rename.clear()

    monkeypatch.setattr("megatron.io.fcntl.flock", rename_first)
    with open_alone(path) as file:
        file.write(b"other")
    assert (tmp_path / "x").read_text() == "whole"
    assert path.read_text() == "other"


def status_of_child(work: Callable[[], None]) -> int:
    """How a copy of this process ends that does the work; whatever happens in it, it goes no further."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(240)  # one that waits for a lock that it has only copied is ended by the system
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("n_renamed", range(7))
def test_killed_while_two_outputs_get_their_names_the_same_call_only_gives_them(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch, n_renamed: int
) -> None:
    options = Options(keys=("text", "other"))
    preprocess([str(source)], tmp_path / "whole", tokenizer, options)
    rename, renamed = Path.rename, []

    def dying(path: Path, target: Path) -> Path:
        if Path(target).name.startswith("out_"):
            renamed.append(target)
            if len(renamed) > n_renamed:
                os._exit(9)  # nothing is tidied up, as by SIGKILL
        return rename(path, target)

    def work() -> None:
        monkeypatch.setattr(indexed_writer.Path, "rename", dying)
        preprocess([str(source)], tmp_path / "out", tokenizer, options)

    assert status_of_child(work) == (9 if n_renamed < 6 else 0)
    monkeypatch.setattr(module, "encode_piece", None)  # none is encoded again
    preprocess([str(source)], tmp_path / "out", tokenizer, options)
    for key in options.keys:
        assert held(tmp_path / "out", key) == held(tmp_path / "whole", key)
    assert not (tmp_path / ".out.shards").exists()


FULL_DISK = """
import resource, sys
from pathlib import Path
from megatron.data import preprocess as m
m.PIECE_BYTES = 40_000
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]),) * 2)
m.preprocess([sys.argv[1]], Path(sys.argv[2]), sys.argv[3], m.Options(quiet=True))
"""


def test_a_full_disk_leaves_no_output_and_the_same_call_goes_on_from_what_is_finished(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals = preprocess([str(source)], tmp_path / "whole", tokenizer, Options())
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
    preprocess([str(source)], tmp_path / "out", tokenizer, Options())
    assert 0 not in encoded  # perhaps none is: pieces are encoded while the first are joined
    assert held(tmp_path / "out") == held(tmp_path / "whole")


def test_a_full_disk_leaves_nothing_of_a_joined_pair(tmp_path: Path, source: Path, tokenizer: str) -> None:
    preprocess([str(source)], tmp_path / "x", tokenizer, Options())
    n_bytes = (tmp_path / "x_text_document.bin").stat().st_size

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes + 1,) * 2)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            merge([str(tmp_path / "x_text_document")] * 2, tmp_path / "joined")
        except OSError as error:
            os._exit(error.errno or 1)

    assert status_of_child(work) == errno.EFBIG
    assert not list(tmp_path.glob("joined*"))


def test_rejects_of_a_job_that_was_stopped_and_went_on_are_those_of_an_undisturbed_one(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = source.read_text().splitlines()
    for i in range(2990, 0, -37):
        lines.insert(i, BAD if i % 2 else '{"text": null}')
    source.write_text("\n".join(lines))
    options = Options(skip_bad_lines=True)
    whole = preprocess([str(source)], tmp_path / "whole", tokenizer, options)
    take, n_taken = module.Joining.take, []

    def stopping(joining: module.Joining) -> None:
        n_taken.append(1)
        if len(n_taken) == 4:
            raise KeyboardInterrupt
        take(joining)

    with monkeypatch.context() as patched:
        patched.setattr(module.Joining, "take", stopping)
        with pytest.raises(KeyboardInterrupt):
            preprocess([str(source)], tmp_path / "out", tokenizer, options)
    assert not list(tmp_path.glob("out*"))
    told = preprocess([str(source)], tmp_path / "out", tokenizer, options)
    assert told.n_rejected == whole.n_rejected == 81
    assert held(tmp_path / "out") == held(tmp_path / "whole")
    assert (tmp_path / "out.rejects.jsonl").read_text() == (tmp_path / "whole.rejects.jsonl").read_text()
