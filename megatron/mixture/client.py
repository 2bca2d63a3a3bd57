"""Chunks of documents for training loops of any kind, from this machine's disks or from a server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from megatron.mixture.remote import ChunkSource
from megatron.mixture.tars import as_document

FILLING = -1  # the domain of what is no token of a document


@dataclass(frozen=True)
class Chunk:
    """Documents of one chunk: of each its domain (a place in `names` of the source), and text or token ids.

    A document of a tar is a dict: `__key__`, `text`, and the bytes of each member by its extension.

    identity   of the documents that all chunks together are made of
    """

    number: int
    identity: str
    domains: list[int]
    documents: list[Any]


def windows_of(
    chunk: Chunk, seq_len: int, eod: int, encode: Callable[[str], list[int]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The documents of a chunk one after another, each with `eod` behind it, in windows of S + 1 tokens.

    encode   text to ids; None: the documents are ids already, and end as they end
    Returns windows int64 [n, S + 1] (neighbours share one token) and the domain of each target, int32 [n, S].
    The last window is filled up with `eod`, of domain FILLING; a chunk depends on no other, and none is lost.
    """
    if encode is None:
        documents = [np.asarray(ids, dtype=np.int64) for ids in chunk.documents]
    else:
        documents = [np.array([*encode(text), eod], dtype=np.int64) for text in chunk.documents]
    tokens = np.concatenate([*documents, np.empty(0, np.int64)])
    domains = np.repeat(np.array(chunk.domains, dtype=np.int32), [len(one) for one in documents])
    n = -(-max(0, len(tokens) - 1) // seq_len)
    filled = np.full(n * seq_len + 1, eod, dtype=np.int64)
    of = np.full(n * seq_len + 1, FILLING, dtype=np.int32)
    filled[: len(tokens)], of[: len(tokens)] = tokens[: len(filled)], domains[: len(filled)]
    places = np.arange(n)[:, None] * seq_len + np.arange(seq_len + 1)
    return filled[places], of[places[:, 1:]]


class MixtureDataset(IterableDataset):
    """The chunks of one data-parallel group: numbers group, group + n_groups, ... without end, or to the end.

    For a DataLoader with batch_size=None and any number of workers: the order is the same. Ranks of one group
    (tensor, pipeline, context) give the same `group` and see the same. `open_source` is called in the process
    that reads. The state is the next chunk of all groups together: it resumes on any number of groups.

    torchdata's StatefulDataLoader saves and restores the iterators (`ChunkIterator`), in its workers too. A
    plain DataLoader does not: pass the chunk that was trained on to `state_dict`.
    """

    def __init__(self, open_source: Callable[[], ChunkSource], group: int = 0, n_groups: int = 1) -> None:
        if not 0 <= group < n_groups:
            raise ValueError(f"group {group} of {n_groups}: wanted 0 to {n_groups - 1}")
        self.open_source, self.group, self.n_groups = open_source, group, n_groups
        self.next_chunk = 0
        self.first_chunk = 0  # of an epoch of StatefulDataLoader; next_chunk only for the one that is resumed
        self.identity: str | None = None
        self._place: Place | None = None  # of the latest iterator of this process
        self._in_workers = torch.zeros(1, dtype=torch.int64).share_memory_()  # iterators of other processes

    def __getstate__(self) -> dict[str, Any]:
        """Places of iterators stay in their process."""
        return self.__dict__ | {"_place": None}

    def state_dict(self, consumed: Chunk | None = None) -> dict[str, Any]:
        """After training on `consumed` in every group; what was only fetched ahead does not count.

        Without `consumed`: behind the last chunk that this process was given. ValueError where worker
        processes read the chunks: what they read ahead and what was trained on is not known here.
        """
        if consumed is not None:
            rounds = consumed.number // self.n_groups + 1
            return {"next_chunk": rounds * self.n_groups, "identity": consumed.identity}
        if get_worker_info() is None and int(self._in_workers):
            raise ValueError(
                "state_dict() of a dataset that worker processes read: got no chunk, expected the last one "
                "that was trained on; call state_dict(chunk), or save the state of a StatefulDataLoader"
            )
        latest = self if self._place is None else self._place
        return {
            "next_chunk": latest.next_chunk,
            "identity": latest.identity,
            "first_chunk": self.first_chunk,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, of any number of groups."""
        self.next_chunk, self.identity = state["next_chunk"], state["identity"]
        self.first_chunk = state.get("first_chunk", self.next_chunk)
        self._place = None
        self._in_workers.zero_()

    def __iter__(self) -> "ChunkIterator":
        worker = get_worker_info()
        iterator = self.chunks() if worker is None else self.chunks(worker.id, worker.num_workers)
        self._place = iterator.place
        self._in_workers.fill_(worker is not None)
        return iterator

    def chunks(
        self, worker: int = 0, n_workers: int = 1, source: ChunkSource | None = None
    ) -> "ChunkIterator":
        """Those of one of several processes that read by turns, from `source` or from one of their own."""
        return ChunkIterator(self, worker, n_workers, source)


@dataclass
class Place:
    """How far an iterator is. Apart from it: a dataset that kept the iterator would keep its open source."""

    next_chunk: int
    identity: str | None


class ChunkIterator:
    """The chunks of one worker of a `MixtureDataset`, with the state that StatefulDataLoader saves.

    The source is opened with the first chunk. `next_chunk` in the state: number of the next chunk of this
    worker, less the group, so that every rank of a job can be given the state of any other.
    """

    def __init__(
        self, dataset: MixtureDataset, worker: int, n_workers: int, source: ChunkSource | None
    ) -> None:
        self.dataset, self.worker, self.n_workers = dataset, worker, n_workers
        self.n_groups = dataset.n_groups
        self.place = Place(dataset.next_chunk + worker * self.n_groups, dataset.identity)
        self._source = source
        self._table: tuple[int, Any] | None = None  # number of the first chunk in it, chunks
        self._is_over = False

    def __iter__(self) -> "ChunkIterator":
        return self

    def __next__(self) -> Chunk:
        if self._is_over:
            raise StopIteration
        if self._source is None:
            self._source = self.dataset.open_source()
        source = self._source
        if self.place.identity not in (None, source.identity):
            raise ValueError("the documents of the mixture have changed; begin anew, or bring them back")
        self.place.identity = source.identity
        number, step = self.place.next_chunk + self.dataset.group, self.n_groups * self.n_workers
        at_once = source.at_once if step == 1 else 1
        if self._table is None or not self._table[0] <= number < self._table[0] + at_once:
            self._table = number, source.read(number, at_once)
        rows = self._table[1].slice((number - self._table[0]) * source.chunk_size, source.chunk_size)
        self._is_over = len(rows) < source.chunk_size  # the last one is shorter, or empty
        if not len(rows):
            raise StopIteration
        domains, documents = (rows.column(i).to_pylist() for i in (0, 1))
        if rows.column_names[1] == "sample":
            documents = [as_document(told) for told in documents]
        self.place.next_chunk += step
        return Chunk(number, source.identity, domains, documents)

    def state_dict(self) -> dict[str, Any]:
        """Behind the chunk that was given last."""
        return {
            "next_chunk": self.place.next_chunk,
            "identity": self.place.identity,
            "n_groups": self.n_groups,
            "worker": [self.worker, self.n_workers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. ValueError for that of another worker or, of several workers, of another
        number of groups."""
        if list(state["worker"]) != [self.worker, self.n_workers]:
            raise ValueError(
                "state of worker {} of {}: got worker {} of {}; resume with as many workers as were saved"
                .format(*state["worker"], self.worker, self.n_workers)
            )  # fmt: skip
        if self.n_workers > 1 and state["n_groups"] != self.n_groups:
            raise ValueError(
                f"state of {state['n_groups']} groups and {self.n_workers} workers: got {self.n_groups}; "
                "resume with as many groups, or save without workers"
            )
        self.place.next_chunk, self.place.identity = state["next_chunk"], state["identity"]
        self._table, self._is_over = None, False
        self.dataset.next_chunk = self.dataset.first_chunk  # the epoch after the resumed one is a whole one
