"""Indexes of sharded checkpoints: chunks that cover their tensor, and messages of bounded length."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.checkpoint.dcp_metadata import _build_metadata, _check_disjoint, _Record


def tile(rng: np.random.Generator, size: tuple[int, ...], n_cuts: int) -> list[ChunkStorageMetadata]:
    """Cut a tensor into boxes along random planes, one box at a time."""
    boxes = [((0,) * len(size), size)]
    for _ in range(n_cuts):
        offset, shape = boxes.pop(int(rng.integers(len(boxes))))
        axis = int(rng.integers(len(size)))
        at = int(rng.integers(1, shape[axis])) if shape[axis] > 1 else 0
        for begin, length in ((0, at), (at, shape[axis] - at)):
            if length:
                new = [(o + begin, length) if i == axis else (o, n)
                       for i, (o, n) in enumerate(zip(offset, shape, strict=True))]  # fmt: skip
                boxes.append((tuple(o for o, _ in new), tuple(n for _, n in new)))
    return [ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)) for offset, shape in boxes]


@pytest.mark.parametrize("size", [(12,), (5, 7), (3, 4, 5)])
def test_chunks_may_not_share_elements_or_leave_a_gap(size: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(size))
    n_refused = 0
    for _ in range(300):
        chunks = tile(rng, size, int(rng.integers(0, 6)))
        _check_disjoint("w", chunks)
        # one chunk at a random other place: counting how often each element is covered is the reference
        i = int(rng.integers(len(chunks)))
        moved = [int(rng.integers(whole - n + 1)) for whole, n in zip(size, chunks[i].sizes, strict=True)]
        chunks[i] = ChunkStorageMetadata(torch.Size(moved), chunks[i].sizes)
        times = np.zeros(size, dtype=int)
        for chunk in chunks:
            times[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        if times.max() > 1:
            n_refused += 1
            with pytest.raises(ValueError, match="w: got two chunks that share elements"):
                _check_disjoint("w", chunks)
        else:
            _check_disjoint("w", chunks)
    assert n_refused > 50


def test_a_key_that_is_nested_through_the_memo_is_not_formatted() -> None:
    nested: tuple = ()
    for _ in range(100):
        nested = (nested, nested)  # its text would have 2^100 brackets
    index = _Record("torch.distributed.checkpoint.metadata.Metadata", ())
    index.state = {"state_dict_metadata": {_Record("x", nested): None}, "storage_data": {}}
    with pytest.raises(ValueError, match="expected tensors only, got _Record"):
        _build_metadata(index, Path("."))
