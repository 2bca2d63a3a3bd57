"""Memory maps of files that take no open file."""

import os
from pathlib import Path

import numpy as np
import pytest

from megatron import _csrc


def test_a_map_has_the_content_and_takes_no_open_file(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)
    content.tofile(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    maps = [_csrc.map_file(str(tmp_path / "x"), n) for n in (1, 4096, 10_000)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all((tokens == content[: len(tokens)]).all() for tokens in maps)
    assert (maps[2].view("<u2")[7:9] == content.view("<u2")[7:9]).all()


def test_a_map_is_read_only_and_ends_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "unique name"
    path.write_bytes(bytes(5000))

    def n_maps() -> int:
        return Path("/proc/self/maps").read_text().count(path.name)

    tokens = _csrc.map_file(str(path), 5000)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1
    view = tokens.view("<u2")[10:20]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    del tokens
    assert n_maps() == 1 and view.sum() == 0
    del view
    assert n_maps() == 0


def test_missing_and_short_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        _csrc.map_file(str(tmp_path / "absent"), 1)
    (tmp_path / "x").write_bytes(b"abc")
    with pytest.raises(ValueError, match="x: got 3 bytes, expected 4 or more"):
        _csrc.map_file(str(tmp_path / "x"), 4)
    for n in (0, -1):
        with pytest.raises(ValueError, match="expected 1 or more"):
            _csrc.map_file(str(tmp_path / "x"), n)
    with pytest.raises(OSError):
        _csrc.map_file(str(tmp_path), 1)
