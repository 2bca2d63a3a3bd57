"""A writer that is killed before any of its system calls leaves the same files when it is repeated."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.text import preprocess as preprocessing
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from megatron.text.write_parts import write_parts_list
from tests.text.preprocessing import CUT, PLAIN, run, write_parts

Write = Callable[[Path, str], object]


class KilledError(BaseException):
    """Stands for SIGKILL in the same process: it leaves all partial files."""


def make_writer(kind: str, folder: Path, tokenizer: str) -> Write:
    """Return a function that writes a dataset from the same inputs to folder/name."""
    if kind == "preprocess":
        (folder / "in.jsonl").write_bytes(b"bad\n" + PLAIN[:CUT])
        options = {"keys": ("text", "url"), "append_eod": True, "skip_bad_lines": True, "n_workers": 1}
        return lambda out, name: run([folder / "in.jsonl"], out / name, tokenizer, **options)
    prefixes = write_parts(folder, 3)
    write: Callable[..., object] = {"merge": merge_datasets, "list of parts": write_parts_list}[kind]
    return lambda out, name: write(prefixes, out / name)


@pytest.mark.parametrize("kind", ["preprocess", "merge", "list of parts"])
def test_a_writer_killed_before_any_of_its_system_calls_ends_equal(
    kind: str, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocessing, "PIECE_BYTES", 40_000)
    write = make_writer(kind, tmp_path, tokenizer)

    def read_files(folder: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / folder).rglob("*") if path.is_file()}

    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole", "out")
    expected = read_files("whole")
    calls, limit = [0], [0]

    def count_calls(call: Callable) -> Callable:
        def counted(*args: object, **options: object) -> object:
            calls[0] += 1
            if calls[0] > limit[0]:
                raise KilledError
            return call(*args, **options)

        return counted

    # a killed process deletes nothing
    for name in ("unlink", "rename"):
        monkeypatch.setattr(Path, name, count_calls(getattr(Path, name)))
    monkeypatch.setattr(
        os, "fsync", count_calls(lambda file: None)
    )  # no crash of the system, which it is for
    gc.freeze()  # a collection looks at the objects of this loop only
    for n_calls in range(200):
        folder = tmp_path / str(n_calls)
        folder.mkdir()
        calls[0], limit[0] = 0, n_calls
        try:
            write(folder, "out")
            break
        except KilledError:
            pass
        gc.collect()  # closes the open files and their locks, as the end of a process does
        limit[0] = 10**9
        write(folder, "out")
        assert read_files(str(n_calls)) == expected, n_calls
    gc.unfreeze()
    assert 5 < n_calls < 199 and read_files(str(n_calls)) == expected
    if kind != "list of parts":
        assert all(list(find_faults(path.with_suffix(""))) == [] for path in folder.glob("*.bin"))
