"""Atomic writes of files and folders, errors of a full disk, and damaged JSON."""

import errno
import os
import re
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron.io import (
    PARTIAL,
    atomic_folder,
    atomic_path,
    code_revision,
    commit_folder,
    create_partial_folder,
    explain_disk_full,
    open_partial_folder,
    publish_files,
    read_json,
    write_atomic,
)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "content.json"
    write_atomic(path, "old")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def target_of(file: int) -> Path:
    """Return the path of an open file."""
    return Path(f"/proc/self/fd/{file}").resolve()


def test_a_new_file_appears_when_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "content.json", []
    monkeypatch.setattr("os.fsync", lambda file: seen.append((target_of(file), path.exists())))
    with atomic_path(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
    # the content before the rename, the folder's entry after it
    assert seen == [(partial, False), (tmp_path, True)]
    assert path.read_text() == "whole"


@pytest.mark.parametrize("is_of_file", [False, True])
def test_a_folder_that_cannot_be_synced_is_accepted_and_a_full_disk_at_the_sync_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_file: bool
) -> None:
    number, path = errno.EDQUOT if is_of_file else errno.EINVAL, tmp_path / "x"

    def refuse(file: int) -> None:
        if target_of(file).is_dir() != is_of_file:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", refuse)
    if not is_of_file:
        write_atomic(path, "whole")
        assert path.read_text() == "whole"
        return
    with pytest.raises(OSError) as raised:
        write_atomic(path, "whole")
    assert (raised.value.errno, raised.value.filename) == (number, f"{path}{PARTIAL}")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_is_resumed_and_an_empty_one_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with pytest.raises(KeyboardInterrupt), atomic_path(path, resume=True):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), atomic_path(path, resume=True) as partial:
        partial.write_text("half ")
        raise KeyboardInterrupt
    with atomic_path(path, resume=True) as partial:
        assert partial.read_text() == "half "
        with partial.open("a") as file:
            file.write("whole")
    assert path.read_text() == "half whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("option", ["exclusive", "resume"])
def test_a_second_writer_of_a_locked_file_is_refused(tmp_path: Path, option: str) -> None:
    path = tmp_path / "x"
    with atomic_path(path, **{option: True}) as partial:
        partial.write_text("first")
        with pytest.raises(ValueError, match=r"x: in use by another process\. Wait"):
            atomic_path(path, **{option: True}).__enter__()
    assert path.read_text() == "first"


@pytest.mark.parametrize("n_changes", range(7))
def test_files_of_a_set_are_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_changes: int
) -> None:
    """A kill before any of three deletions and three renames; the same call then completes the new set."""
    names, left = ("data", "index", "mark"), [n_changes]
    (tmp_path / "new").mkdir()
    for name in names:
        (tmp_path / name).write_text("old")
        (tmp_path / "new" / name).write_text("new")
    files = [(tmp_path / "new" / name, tmp_path / name) for name in names]

    def count(change: Callable[..., Any]) -> Callable[..., Any]:
        def change_or_die(*words: Any, **options: Any) -> Any:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return change(*words, **options)

        return change_or_die

    with monkeypatch.context() as patch:
        for name in ("unlink", "rename"):
            patch.setattr(Path, name, count(getattr(Path, name)))
        with pytest.raises(KeyboardInterrupt) if n_changes < 6 else nullcontext():
            publish_files(files)
    present = {name: (tmp_path / name).read_text() for name in names if (tmp_path / name).exists()}
    assert len(set(present.values())) <= 1 and ("mark" not in present or len(present) == 3)
    publish_files(files)
    assert [(tmp_path / name).read_text() for name in names] == ["new"] * 3


def test_another_writers_partial_file_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_full_disk_is_reported_with_its_folder_free_and_required_space_and_a_fix(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    place = re.escape(str(Path.cwd() / "tokens"))  # the absolute path, because "." would not be informative
    sentence = f"^{place}: No space left on device; make room and run"
    with pytest.raises(OSError, match=sentence), explain_disk_full(Path("tokens")):
        raise full
    full.n_bytes = 2_500_000  # type: ignore[attr-defined]
    sentence = r"No space left on device \([0-9,.]+ MB are free, about 2.5 MB more are needed\); make room"
    with (
        pytest.raises(OSError, match=f"^{re.escape(str(tmp_path))}: {sentence}"),
        explain_disk_full(tmp_path),
    ):
        raise full
    with pytest.raises(FileNotFoundError, match="absent"), explain_disk_full(tmp_path):
        (tmp_path / "absent").read_bytes()  # other errors are unchanged


def test_a_file_that_is_not_a_json_object_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for content in (b"[1]", b"7", b"null", b'"x"', b"{", b"\x80", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^\S*result\.json: "):
            read_json(path)


def test_the_folder_of_a_running_writer_is_not_touched(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with atomic_folder(target) as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / "half").write_text("half")
        with pytest.raises(ValueError, match="target: got another process writing it"):
            atomic_folder(target).__enter__()
        assert (tmp_path / f"target{PARTIAL}" / "deep" / "half").read_text() == "half"
    assert (target / "deep" / "half").is_file() and not (tmp_path / f"target{PARTIAL}").exists()
    with pytest.raises(FileExistsError, match="target: already exists"), atomic_folder(target):
        pass
    assert (target / "deep" / "half").is_file()


def test_an_error_removes_the_folder_and_keeps_what_a_link_in_it_names(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    (tmp_path / f"target{PARTIAL}").mkdir()
    (tmp_path / f"target{PARTIAL}" / "link").symlink_to(tmp_path / "other")
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "target") as partial:
        assert list(partial.iterdir()) == []
        (partial / "link").symlink_to(tmp_path / "other")
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["other", "x"]


def test_a_folder_is_synced_with_its_files_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = create_partial_folder(tmp_path / "folder")
    with pytest.raises(FileExistsError):
        create_partial_folder(tmp_path / "folder")
    (partial / "deep").mkdir()
    (partial / "deep" / "x").touch()
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(target_of(file)))
    commit_folder(partial, tmp_path / "folder")
    assert set(synced[:-1]) == {partial, partial / "deep", partial / "deep" / "x"}
    assert synced[-1] == tmp_path
    assert (tmp_path / "folder" / "deep" / "x").exists()


def test_a_folder_whose_files_are_published_is_removed(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with open_partial_folder(tmp_path / "set", replace=True) as partial:
        (partial / "x").write_text("new")
        (partial / "rest").touch()
        publish_files([(partial / "x", tmp_path / "set" / "x")])
    assert (tmp_path / "set" / "x").read_text() == "new"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["set", "x"]


def test_the_code_revision_marks_changes_and_does_not_write_to_the_checkout(tmp_path: Path) -> None:
    def run_git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert code_revision(tmp_path) is None
    run_git("init", "--quiet")
    (tmp_path / "file").write_text("a")
    run_git("add", "file")
    run_git("commit", "--quiet", "-m", "one")
    os.utime(tmp_path / "file", (1, 1))  # git would update its index, since only the time differs
    before = (tmp_path / ".git" / "index").stat()
    commit = run_git("rev-parse", "HEAD")[:12]
    assert code_revision(tmp_path) == commit
    (tmp_path / "file").write_text("b")
    assert code_revision(tmp_path) == f"{commit}+"
    after = (tmp_path / ".git" / "index").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
