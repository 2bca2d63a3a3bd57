"""Parts of a .bin/.idx dataset for training, validation and test, as Megatron's --split cuts it."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from megatron.data import open_dataset
from megatron.text.subset import DocumentSelection, SubsetResult, subset_dataset

SPLIT_NAMES = ("train", "valid", "test")


def split_documents(n_documents: int, shares: Sequence[Fraction]) -> list[tuple[int, int]]:
    """Return (first, after the last) document of each part.

    Megatron Core rounds the cumulative shares of the documents to whole ones, halves to even.
    """
    # 949,50,1 of 2,000 documents: ends 1898, 1998 and 2000
    ends = [round(n_documents * share / sum(shares)) for share in accumulate(shares)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def split_dataset(
    prefix: Path, output: Path, shares: Sequence[Fraction], quiet: bool = False, overwrite: bool = False
) -> dict[str, SubsetResult]:
    """Write OUTPUT_train, OUTPUT_valid and OUTPUT_test, except parts of share 0. Raises as `subset_dataset`.

    Raises ValueError if a part has a share but no document.
    """
    parts = split_documents(open_dataset(prefix).n_documents, shares)
    results = {}
    for name, share, (first, end) in zip(SPLIT_NAMES, shares, parts, strict=False):
        if not share:
            continue
        if first == end:
            raise ValueError(f"{prefix}: the part {name} has no document. Use a larger share, or 0.")
        selection = DocumentSelection(documents=end - first, skip=first)
        target = output.with_name(f"{output.name}_{name}")
        results[name] = subset_dataset(prefix, target, selection, quiet, overwrite)
    return results
