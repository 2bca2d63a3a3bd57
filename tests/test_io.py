"""Atomic writes of files and folders, errors of a full disk, and damaged JSON."""

import errno
import os
import re
import subprocess
from pathlib import Path

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
    monkeypatch.setattr(
        "os.fsync", lambda file: seen.append((Path(f"/proc/self/fd/{file}").resolve(), path.exists()))
    )
    with atomic_path(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
    # the content before the rename, the folder's entry after it
    assert seen == [(partial, False), (tmp_path, True)]
    assert path.read_text() == "whole"


def test_a_file_system_that_syncs_no_folders_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse_folders(file: int) -> None:
        if Path(f"/proc/self/fd/{file}").resolve().is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(file)

    monkeypatch.setattr("os.fsync", refuse_folders)
    write_atomic(tmp_path / "x", "whole")
    assert (tmp_path / "x").read_text() == "whole"


def test_a_full_disk_that_only_the_sync_reports_is_an_error_of_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(OSError) as raised:
        write_atomic(tmp_path / "x", "whole")
    assert (raised.value.errno, raised.value.filename) == (errno.EDQUOT, str(tmp_path / f"x{PARTIAL}"))
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


def test_files_that_belong_together_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before any change of the folder; the same call afterwards completes the new set."""
    names = ("data", "index", "mark")
    unlink, rename = Path.unlink, Path.rename
    for n_changes in range(7):
        folder = tmp_path / str(n_changes)
        (folder / "new").mkdir(parents=True)
        for name in names:
            (folder / name).write_text("old")
            (folder / "new" / name).write_text("new")
        files = [(folder / "new" / name, folder / name) for name in names]
        left = [n_changes]

        def count(change, left=left):
            def wrapped(*words, **options):
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
                return change(*words, **options)

            return wrapped

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", count(unlink))
            patch.setattr(Path, "rename", count(rename))
            try:
                publish_files(files)
                assert n_changes == 6  # three deletions and three renames
            except KeyboardInterrupt:
                assert n_changes < 6
        present = {name: (folder / name).read_text() for name in names if (folder / name).exists()}
        assert len(set(present.values())) <= 1
        if "mark" in present:
            assert len(present) == 3
        publish_files(files)
        assert [(folder / name).read_text() for name in names] == ["new"] * 3


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


def test_a_full_disk_is_reported_with_free_and_required_space(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    error.n_bytes = 2_500_000  # type: ignore[attr-defined]
    expected = r"No space left on device \([0-9,.]+ MB are free, about 2.5 MB more are needed\); make room"
    with (
        pytest.raises(OSError, match=f"^{re.escape(str(tmp_path))}: {expected}"),
        explain_disk_full(tmp_path),
    ):
        raise error
    with pytest.raises(FileNotFoundError, match="absent"), explain_disk_full(tmp_path):
        (tmp_path / "absent").read_bytes()  # other errors are unchanged


@pytest.mark.parametrize("content", ["[1]", "7", "null", '"x"', "{", "\x80", "[" * 100_000])
def test_a_file_that_is_not_a_json_object_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content.encode("latin-1"))
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


def test_a_folder_is_synced_with_all_its_files_before_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = create_partial_folder(tmp_path / "folder")
    with pytest.raises(FileExistsError):
        create_partial_folder(tmp_path / "folder")
    (partial / "deep").mkdir()
    (partial / "deep" / "x").touch()
    synced = []
    monkeypatch.setattr("os.fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").resolve()))
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
