"""Atomic writes, errors of a full disk, and readers of damaged files."""

import errno
import json
import re
from pathlib import Path

import pytest

from megatron.io import atomic_path, explain_disk_full, read_json, write_atomic
from megatron.run_dir import read_last_metrics, read_metrics

FULL = Path("/dev/full")  # every write fails as on a full disk


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "content.json"
    write_atomic(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_appears_only_when_it_is_complete_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "content.json"
    seen = []
    monkeypatch.setattr("os.fsync", lambda file: seen.append((file > 2, path.exists())))
    with atomic_path(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
    assert seen == [(True, False)]
    assert path.read_text() == "whole"


def test_a_partial_file_begun_by_another_writer_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "content.json"
    rename = Path.rename

    def renamed_and_begun_again(partial: Path, target: Path) -> Path:
        done = rename(partial, target)
        partial.write_text("another")
        return done

    monkeypatch.setattr(Path, "rename", renamed_and_begun_again)
    with atomic_path(path) as partial:
        partial.write_text("ours")
    assert (path.read_text(), partial.read_text()) == ("ours", "another")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_with_its_folder_and_a_fix() -> None:
    place = re.escape(str(Path.cwd() / "tokens"))  # the absolute path, because "." would not be informative
    with (
        pytest.raises(OSError, match=f"^{place}: No space left on device; make room and run"),
        explain_disk_full(Path("tokens")),
        FULL.open("wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_other_system_errors_are_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), explain_disk_full(tmp_path):
        (tmp_path / "absent").read_bytes()


def test_a_full_disk_is_reported_with_free_and_required_space(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    error.n_bytes = 2_500_000  # type: ignore[attr-defined]
    expected = r"No space left on device \([0-9,.]+ MB are free, about 2.5 MB more are needed\); make room"
    with (
        pytest.raises(OSError, match=f"^{re.escape(str(tmp_path))}: {expected}"),
        explain_disk_full(tmp_path),
    ):
        raise error


@pytest.mark.parametrize("content", ["[1]", "7", "null", '"x"', "{", "\x80", "[" * 100_000])
def test_a_file_that_is_not_a_json_object_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^\S*result\.json: "):
        read_json(path)


@pytest.mark.parametrize("line", [b"{", b"\x80{}", b"[1]", b'{"kind": "train"}', b'{"kind": [], "step": 1}'])
def test_a_damaged_line_of_metrics_is_named_and_the_last_complete_line_precedes_it(
    tmp_path: Path, line: bytes
) -> None:
    good = b'{"kind": "train", "step": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n" + b'{"kind"')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: got .* Remove the line\."):
        list(read_metrics(tmp_path))
    last = read_last_metrics(tmp_path)
    assert last == {"kind": "train", "step": 1} or last == json.loads(line)
    (tmp_path / "metrics.jsonl").write_bytes(good + b"\x80\n[1]\n")
    assert read_last_metrics(tmp_path) == {"kind": "train", "step": 1}
