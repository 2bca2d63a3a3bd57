"""Resumption through torchdata's StatefulDataLoader: by its protocol, and with the package if installed."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from copy import deepcopy
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
N_DOCUMENTS = 3000  # in the fixture `mixture`


def make_dataset(mixture: Path, group: int = 0, n_groups: int = 1) -> MixtureDataset:
    return MixtureDataset(partial(DocumentChunks, mixture, chunk_size=SIZE), group, n_groups)


def list_texts(chunk: Chunk) -> tuple[int, list[str]]:
    return chunk.number, chunk.documents


def make_finite(mixture: Path) -> Path:
    """Return a mixture of the same documents once: 46 whole chunks and one of 56."""
    if "dry" not in mixture.read_text():
        mixture.write_text(mixture.read_text() + "dry: redistribute\n")
    return mixture


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


class Protocol:
    """Calls of StatefulDataLoader on a dataset in one process: the dataset's state, then the iterator's."""

    def __init__(self, dataset: MixtureDataset, state: dict[str, Any] | None = None) -> None:
        self.dataset = dataset
        if state is not None:
            dataset.load_state_dict(state["dataset"])
        self.iterator: Any = iter(dataset)
        if state is not None:
            self.iterator.load_state_dict(state["iterator"])

    def __iter__(self) -> Iterator[Chunk]:
        return self.iterator

    def state_dict(self) -> dict[str, Any]:
        state = {"dataset": self.dataset.state_dict(), "iterator": self.iterator.state_dict()}
        return json.loads(json.dumps(state))


@pytest.mark.parametrize(("group", "n_groups"), [(0, 1), (1, 3)])
def test_repeated_resumes_by_the_protocol_return_the_whole_stream(mixture, group, n_groups) -> None:
    make_finite(mixture)
    whole = [list_texts(chunk) for chunk in make_dataset(mixture, group, n_groups)]
    assert [number for number, _ in whole] == list(range(group, 47, n_groups))
    if n_groups == 1:
        assert len({text for _, texts in whole for text in texts}) == N_DOCUMENTS
    reading, received = Protocol(make_dataset(mixture, group, n_groups)), []
    for n in (0, 5, 1, 3, 100):
        received += [list_texts(chunk) for chunk in islice(reading, n)]
        reading = Protocol(make_dataset(mixture, group, n_groups), reading.state_dict())
    assert received == whole
    assert [*reading] == []
    assert [list_texts(chunk) for chunk in reading.dataset] == whole  # the next epoch is complete


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


def test_a_state_of_other_documents_workers_or_groups_is_refused(mixture) -> None:
    reading = Protocol(make_dataset(mixture))
    next(iter(reading))
    state = reading.state_dict()
    other = deepcopy(state)
    other["iterator"]["worker"] = [1, 2]
    with pytest.raises(ValueError, match="state of worker 1 of 2: got worker 0 of 1. Resume with as many"):
        Protocol(make_dataset(mixture), other)
    one_of_two = ChunkIterator(make_dataset(mixture), 1, 2)
    with pytest.raises(ValueError, match="state of 3 groups and 2 workers"):
        one_of_two.load_state_dict(one_of_two.state_dict() | {"n_groups": 3})
    for part in ("dataset", "iterator"):
        other = deepcopy(state)
        other[part]["identity"] = "0" * 64
        if part == "dataset":
            other["iterator"]["identity"] = other[part]["identity"]
        with pytest.raises(ValueError, match="documents of the mixture have changed"):
            next(iter(Protocol(make_dataset(mixture), other)))


def check_resumes(loader: Callable[[], Any], n_chunks: int, stops: tuple[int, ...]) -> None:
    """Read, save, load into a new loader, and repeat.

    The result must be the uninterrupted stream, followed by the next epoch.
    """
    whole = [list_texts(chunk) for chunk in loader()]
    assert [number for number, _ in whole] == list(range(n_chunks))
    received: list[tuple[int, list[str]]] = []
    state: dict[str, Any] = {}
    for n in stops:
        reading = loader()
        reading.load_state_dict(state)
        received += [list_texts(chunk) for chunk in islice(reading, n)]
        state = reading.state_dict()
        del reading
    assert received == whole[: sum(stops)]
    reading = loader()
    reading.load_state_dict(state)
    assert [list_texts(chunk) for chunk in reading] == whole[sum(stops) :]
    assert [list_texts(chunk) for chunk in islice(reading, 3)] == whole[:3]  # the next epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_the_package_resumes_several_times_inside_an_epoch(mixture, workers) -> None:
    package = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    context = {"multiprocessing_context": FORKS} if workers else {}

    def loader() -> Any:
        source = Numbers if workers else partial(DocumentChunks, make_finite(mixture), chunk_size=70)
        dataset = MixtureDataset(source)
        return package.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **context)

    check_resumes(loader, 43, (5, 1, 4, 31))
