"""Parts of a dataset as Megatron's --split cuts them."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.text.split import split_dataset, split_documents


def megatron_core_bounds(n: int, shares: tuple[float, ...]) -> list[tuple[int, int]]:
    """Return the ranges of Megatron Core: cumulative normalised shares, times documents, rounded."""
    whole = np.cumsum([0.0, *(share / sum(shares) for share in shares)])
    return [(int(round(a * n)), int(round(b * n))) for a, b in zip(whole[:-1], whole[1:], strict=True)]


@pytest.mark.parametrize("n", [7, 100, 1999])
@pytest.mark.parametrize("shares", [(949, 50, 1), (969, 30, 1), (100, 0, 0), (90, 10)])
def test_the_parts_are_those_of_megatron_core(n: int, shares: tuple[int, ...]) -> None:
    parts = split_documents(n, [Fraction(share) for share in shares])
    assert parts == megatron_core_bounds(n, shares)
    assert parts[0][0] == 0 and parts[-1][1] == n


def test_a_dataset_is_cut_into_its_documents_in_order(tmp_path: Path) -> None:
    documents = [np.arange(5) + 10 * i for i in range(10)]
    with IndexedWriter(tmp_path / "all", np.dtype("<u2"), {"append_eod": False}) as writer:
        for document in documents:
            writer.add_documents(document.astype(np.uint16), np.array([5]))
    results = split_dataset(
        tmp_path / "all", tmp_path / "part", [Fraction(7), Fraction(3), Fraction(0)], True
    )
    assert {name: part.n_documents for name, part in results.items()} == {"train": 7, "valid": 3}
    valid = IndexedTokens(tmp_path / "part_valid")
    assert np.array_equal(valid.tokens, np.concatenate(documents[7:]))
    assert valid.sidecar is not None and valid.sidecar["selection"] == {"documents": 3, "skip": 7}
    assert split_dataset(tmp_path / "all", tmp_path / "part", [Fraction(7), Fraction(3)], True) == results
    with pytest.raises(ValueError, match="the part valid has no document"):
        split_dataset(tmp_path / "all", tmp_path / "other", [Fraction(1000), Fraction(1)], True)
