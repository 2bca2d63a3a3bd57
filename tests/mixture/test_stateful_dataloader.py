"""Resumption through torchdata's StatefulDataLoader: by its protocol, and with the package if installed."""

import json
import multiprocessing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

from megatron.mixture.documents import DocumentChunks
from megatron.mixture.loaders import Chunk, ChunkIterator, MixtureDataset

# a process that has imported the loaders, and whose forks are the workers: the
# tests' own process has threads of other libraries, which a fork may break
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "torchdata.stateful_dataloader", "datasets", __name__])
SIZE = 64


def make_dataset(mixture: Path, group: int = 0, n_groups: int = 1) -> MixtureDataset:
    return MixtureDataset(partial(DocumentChunks, mixture, chunk_size=SIZE), group, n_groups)


def list_texts(chunk: Chunk) -> tuple[int, list[str]]:
    return chunk.number, chunk.documents


class Numbers:
    """Source of 300 documents, with a short last chunk."""

    identity, names, chunk_size, at_once = "numbers", ("all",), 7, 4

    def read(self, first: int, n_chunks: int, position: Any = None) -> pa.Table:
        numbers = range(first * 7, min(300, (first + n_chunks) * 7))
        return pa.table({"domain": [0] * len(numbers), "text": [f"text {i}" for i in numbers]})

    def find_position(self, chunk: int, position: Any = None) -> dict[str, Any]:
        return {"chunk": chunk}

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        return False


@pytest.mark.slow
def test_the_state_follows_the_chunks_and_requires_the_chunk_of_workers(mixture: Path) -> None:
    dataset = make_dataset(mixture)
    assert dataset.state_dict()["next_chunk"] == 0
    [*islice(dataset, 5)]
    again = make_dataset(mixture)
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    assert next(iter(again)).number == 5
    dataset = MixtureDataset(Numbers)
    [*islice(dataset, 2)]
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=FORKS)
    (chunk,) = islice(loader, 1)
    with pytest.raises(ValueError, match="got no chunk, expected the last one that was trained on"):
        dataset.state_dict()
    assert dataset.state_dict(chunk)["next_chunk"] == 1


def test_a_state_of_other_documents_workers_or_groups_is_refused(mixture: Path) -> None:
    dataset = make_dataset(mixture)
    iterator = iter(dataset)
    next(iterator)
    state, other = iterator.state_dict(), iter(make_dataset(mixture))
    with pytest.raises(ValueError, match="state of worker 1 of 2: got worker 0 of 1. Resume with as many"):
        other.load_state_dict(state | {"worker": [1, 2]})
    one_of_two = ChunkIterator(make_dataset(mixture), 1, 2)
    with pytest.raises(ValueError, match="state of 3 groups and 2 workers"):
        one_of_two.load_state_dict(one_of_two.state_dict() | {"n_groups": 3})
    changed = make_dataset(mixture)
    changed.load_state_dict(dataset.state_dict() | {"identity": "0" * 64})
    other.load_state_dict(state | {"identity": "0" * 64})
    for reading in (iter(changed), other):
        with pytest.raises(ValueError, match="documents of the mixture have changed"):
            next(reading)


# (worker processes, group, number of groups)
IN_PROCESSES = pytest.param(2, 0, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("workers", "group", "n_groups"), [(0, 0, 1), (0, 1, 3), IN_PROCESSES])
def test_repeated_resumes_inside_an_epoch_return_the_whole_stream(
    mixture: Path, workers: int, group: int, n_groups: int
) -> None:
    package = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    context = {"multiprocessing_context": FORKS} if workers else {}
    mixture.write_text(
        mixture.read_text() + "dry: redistribute\n"
    )  # 46 whole chunks, and one of 56 documents

    def load(state: dict[str, Any]) -> Any:
        dataset = MixtureDataset(Numbers) if workers else make_dataset(mixture, group, n_groups)
        loader = package.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **context)
        loader.load_state_dict(state)
        return loader

    whole = [list_texts(chunk) for chunk in load({})]
    assert [number for number, _ in whole] == list(range(group, 43 if workers else 47, n_groups))
    if not workers and n_groups == 1:
        assert len({text for _, texts in whole for text in texts}) == 3000
    received: list[tuple[int, list[str]]] = []
    state: dict[str, Any] = {}
    for n in (0, 5, 1, 4):
        loader = load(state)
        received += [list_texts(chunk) for chunk in islice(loader, n)]
        state = json.loads(json.dumps(loader.state_dict()))
        del loader
    assert received == whole[:10]
    loader = load(state)
    assert [list_texts(chunk) for chunk in loader] == whole[10:]
    assert [list_texts(chunk) for chunk in islice(loader, 3)] == whole[:3]  # the next epoch
