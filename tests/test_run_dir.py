"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from megatron.run_dir import write_whole, written_whole


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
