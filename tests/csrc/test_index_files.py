"""Checks of an index against numpy, and memory maps of files that take no open file."""

from pathlib import Path

import numpy as np
import pytest

from megatron import _csrc


def write_index(path: Path, lengths: np.ndarray, positions: np.ndarray, boundaries: np.ndarray) -> Path:
    path.write_bytes(
        b"head" + lengths.astype("<i4").tobytes() + positions.astype("<i8").tobytes()
        + boundaries.astype("<i8").tobytes()
    )  # fmt: skip
    return path


def check_index(path: Path, n_sequences: int, n_documents: int) -> tuple[int, int, bool, bool]:
    with path.open("rb") as file:
        return _csrc.check_index(file.fileno(), 4, n_sequences, n_documents, 2)


@pytest.mark.parametrize("n", [0, 1, (1 << 14) - 1, 1 << 14, 40_000])  # blocks have 1 << 14 numbers
def test_an_index_in_order_is_sound_and_gives_its_tokens(tmp_path: Path, n: int) -> None:
    lengths = np.random.default_rng(n).integers(0, 100_000, n)
    path = write_index(tmp_path / "i", lengths, (np.cumsum(lengths) - lengths) * 2, np.arange(n + 1))
    assert check_index(path, n, n) == (lengths.sum(), lengths.max(initial=0), True, True)


@pytest.mark.parametrize("at", [0, 5, 20_000, 39_999])
def test_a_wrong_number_anywhere_is_detected(tmp_path: Path, at: int) -> None:
    n = 40_000
    lengths = np.full(n, 3)
    positions, boundaries = (np.cumsum(lengths) - lengths) * 2, np.arange(n + 1)
    moved = positions + (np.arange(n) == at)
    path = write_index(tmp_path / "p", lengths, moved, boundaries)
    assert check_index(path, n, n) == (3 * n, 3, False, True)
    negative = np.where(np.arange(n) == at, -1, lengths)
    assert check_index(write_index(tmp_path / "l", negative, positions, boundaries), n, n)[3] is False
    for wrong in (boundaries[at] + 2, boundaries[at] - 2):
        fallen = np.where(np.arange(n + 1) == at, wrong, boundaries)
        assert check_index(write_index(tmp_path / "b", lengths, positions, fallen), n, n)[2:] == (True, False)


def test_boundaries_end_with_the_sequences_and_the_file_with_the_boundaries(tmp_path: Path) -> None:
    path = write_index(tmp_path / "b", np.array([1, 2]), np.array([0, 2]), np.array([0, 1]))
    assert check_index(path, 2, 1) == (3, 2, True, False)
    with pytest.raises(RuntimeError, match="became shorter"):
        check_index(path, 2, 5)


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
