"""Files that appear whole or not at all, and what is said where the disk does not take them."""

import errno
import json
import re
from pathlib import Path

import pytest

from megatron.run_dir import last_metrics, read_json, read_metrics, room_in, write_whole, written_whole

FULL = Path("/dev/full")  # takes nothing, as a full disk does


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    write_whole(path, "old")
    with pytest.raises(KeyboardInterrupt), written_whole(path) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_new_file_is_seen_only_when_it_is_whole_and_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "told.json"
    seen = []
    monkeypatch.setattr("os.fsync", lambda file: seen.append((file > 2, path.exists())))
    with written_whole(path) as partial:
        partial.write_text("whole")
        assert not path.exists()
    assert seen == [(True, False)]
    assert path.read_text() == "whole"


def test_what_another_writer_begins_after_the_renaming_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "told.json"
    rename = Path.rename

    def renamed_and_begun_again(partial: Path, target: Path) -> Path:
        done = rename(partial, target)
        partial.write_text("another")
        return done

    monkeypatch.setattr(Path, "rename", renamed_and_begun_again)
    with written_whole(path) as partial:
        partial.write_text("ours")
    assert (path.read_text(), partial.read_text()) == ("ours", "another")


@pytest.mark.skipif(not FULL.exists(), reason="wants /dev/full")
def test_a_full_disk_is_told_with_its_folder_and_the_way_out() -> None:
    place = re.escape(str(Path.cwd() / "tokens"))  # the whole path: of "." it would say nothing
    with (
        pytest.raises(OSError, match=f"^{place}: No space left on device; make room and run"),
        room_in(Path("tokens")),
        FULL.open("wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_what_else_the_system_refuses_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), room_in(tmp_path):
        (tmp_path / "absent").read_bytes()


def test_a_full_disk_is_told_with_what_is_free_and_what_is_needed(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "No space left on device")
    error.n_bytes = 2_500_000  # type: ignore[attr-defined]
    expected = r"No space left on device \([0-9,.]+ MB are free, about 2.5 MB more are needed\); make room"
    with pytest.raises(OSError, match=f"^{re.escape(str(tmp_path))}: {expected}"), room_in(tmp_path):
        raise error


@pytest.mark.parametrize("content", ["[1]", "7", "null", '"x"', "{", "\x80", "[" * 100_000])
def test_what_is_no_json_object_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^\S*result\.json: "):
        read_json(path)


@pytest.mark.parametrize("line", [b"{", b"\x80{}", b"[1]", b'{"kind": "train"}', b'{"kind": [], "step": 1}'])
def test_a_damaged_line_of_metrics_is_named_and_the_last_whole_one_is_before_it(
    tmp_path: Path, line: bytes
) -> None:
    good = b'{"kind": "train", "step": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n" + b'{"kind"')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: got .* Remove the line\."):
        list(read_metrics(tmp_path))
    last = last_metrics(tmp_path)
    assert last == {"kind": "train", "step": 1} or last == json.loads(line)
    (tmp_path / "metrics.jsonl").write_bytes(good + b"\x80\n[1]\n")
    assert last_metrics(tmp_path) == {"kind": "train", "step": 1}
