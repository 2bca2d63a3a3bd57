"""Chunks of documents for any training loop, read from local disks or from a server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from megatron.mixture.catalog.tars import sample_to_document
from megatron.mixture.serve.remote import ChunkSource

PADDING = -1  # domain of a target that is not a token of a document


@dataclass(frozen=True)
class Chunk:
    """Documents of one chunk, as text or token ids, with their domains (indices into `names` of the source).

    A document of a tar archive is a dict: `__key__`, `text`, and the bytes of each member by its extension.

    identity   hash of all documents of the mixture
    """

    number: int
    identity: str
    domains: list[int]
    documents: list[Any]


def pack_windows(
    chunk: Chunk, seq_len: int, eod: int, encode: Callable[[str], list[int]] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the documents of a chunk, each followed by `eod`, and cut windows of S + 1 tokens.

    encode   text to ids; None: the documents are ids already, and no `eod` is added

    Returns windows int64 [n, S + 1], where neighbours share one token, and the domain of each target, int32
    [n, S]. The last window is padded with `eod`, whose domain is PADDING. A chunk is packed independently of
    the others, and no token is dropped.
    """
    if encode is None:
        documents = [np.asarray(ids, dtype=np.int64) for ids in chunk.documents]
    else:
        documents = [np.array([*encode(text), eod], dtype=np.int64) for text in chunk.documents]
    # the empty array allows a chunk without documents, and sets the type
    tokens = np.concatenate([*documents, np.empty(0, np.int64)])
    domains = np.repeat(np.array(chunk.domains, dtype=np.int32), [len(document) for document in documents])
    # T tokens have T - 1 targets; ceil((T - 1) / S) windows cover them.
    # Example: S = 3, T = 8: 7 targets, n = 3 windows from 0, 3 and 6, of 10 tokens with 2 of padding.
    n = -(-max(0, len(tokens) - 1) // seq_len)
    padded = np.full(n * seq_len + 1, eod, dtype=np.int64)
    padded_domains = np.full(n * seq_len + 1, PADDING, dtype=np.int32)
    padded[: len(tokens)], padded_domains[: len(tokens)] = tokens[: len(padded)], domains[: len(padded)]
    # [n, S + 1]: window w starts at w S and shares its last token with window w + 1
    positions = np.arange(n)[:, None] * seq_len + np.arange(seq_len + 1)
    # a target counts for the domain of its document, even if the inputs of the window are of another
    return padded[positions], padded_domains[positions[:, 1:]]


windows_of = pack_windows  # former name, kept for existing scripts


class MixtureDataset(IterableDataset[Chunk]):
    """Chunks of one data-parallel group: numbers group, group + n_groups, ... up to the end of the mixture.

    For a DataLoader with batch_size=None and any number of workers: the order is the same. Ranks of one group
    (tensor, pipeline, context) pass the same `group` and get the same chunks. `open_source` is called in the
    process that reads. The state is the next chunk of all groups together, so that it resumes on any number
    of groups.

    torchdata's StatefulDataLoader saves and restores the iterators (`ChunkIterator`), also in its workers. A
    plain DataLoader does not: pass the last trained chunk to `state_dict`.
    """

    def __init__(self, open_source: Callable[[], ChunkSource], group: int = 0, n_groups: int = 1) -> None:
        if not 0 <= group < n_groups:
            raise ValueError(f"group: got {group} of {n_groups}, expected 0 to {n_groups - 1}.")
        self.open_source, self.group, self.n_groups = open_source, group, n_groups
        self.next_chunk = 0
        # of an epoch of StatefulDataLoader; next_chunk applies to the resumed epoch only
        self.first_chunk = 0
        self.identity: str | None = None
        self._position: IteratorPosition | None = None  # position of the latest iterator of this process
        # 1 if the iterators are in other processes.
        # In shared memory: __iter__ sets it in a worker process, and state_dict reads it in the main process.
        self._in_workers = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the position of an iterator, which stays in its process."""
        return self.__dict__ | {"_position": None}

    def state_dict(self, consumed: Chunk | None = None) -> dict[str, Any]:
        """Return the state after training on `consumed` in every group. Prefetched chunks do not count.

        Without `consumed`, the state is behind the last chunk that this process returned. Raises ValueError
        if worker processes read the chunks, because this process cannot tell prefetched from trained chunks.
        """
        if consumed is not None:
            # Chunks are dealt round-robin, so that every group has finished the same number of rounds.
            # 3 groups, chunk 7: round 2 is chunks 6, 7 and 8, so that the next chunk is 9.
            rounds = consumed.number // self.n_groups + 1
            return {"next_chunk": rounds * self.n_groups, "identity": consumed.identity}
        if get_worker_info() is None and int(self._in_workers):
            raise ValueError(
                "state_dict() of a dataset that worker processes read: got no chunk, expected the last one "
                "that was trained on. Call state_dict(chunk), or save the state of a StatefulDataLoader."
            )
        latest = self if self._position is None else self._position
        return {
            "next_chunk": latest.next_chunk,
            "identity": latest.identity,
            "first_chunk": self.first_chunk,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that was saved by any number of groups."""
        self.next_chunk, self.identity = state["next_chunk"], state["identity"]
        # a state of state_dict(chunk) has no first chunk: later epochs begin at the same chunk then
        self.first_chunk = state.get("first_chunk", self.next_chunk)
        self._position = None
        self._in_workers.zero_()

    def __iter__(self) -> "ChunkIterator":
        worker = get_worker_info()
        iterator = self.iter_chunks() if worker is None else self.iter_chunks(worker.id, worker.num_workers)
        self._position = iterator.position
        self._in_workers.fill_(worker is not None)
        return iterator

    def iter_chunks(
        self, worker: int = 0, n_workers: int = 1, source: ChunkSource | None = None
    ) -> "ChunkIterator":
        """Return an iterator over the chunks of one of `n_workers` processes that share the group's chunks.

        source   read from it; None: open a separate one
        """
        return ChunkIterator(self, worker, n_workers, source)


@dataclass
class IteratorPosition:
    """Progress of an iterator.

    It is a separate object because a dataset that kept the iterator would keep its open source.
    """

    next_chunk: int
    identity: str | None


class ChunkIterator:
    """Chunks of one worker of a `MixtureDataset`, with the state that StatefulDataLoader saves.

    The first chunk opens the source. `next_chunk` in the state is the number of the next chunk of this worker
    minus the group, so that every rank of a job can load the state of any other rank.
    """

    def __init__(
        self, dataset: MixtureDataset, worker: int, n_workers: int, source: ChunkSource | None
    ) -> None:
        self.dataset, self.worker, self.n_workers = dataset, worker, n_workers
        self.n_groups = dataset.n_groups
        # 2 groups, 3 workers, group 1: worker 0 reads chunks 1, 7, 13, worker 1 reads 3, 9, 15, and worker 2
        # reads 5, 11, 17. A DataLoader takes the workers in turn, so that the order is 1, 3, 5, 7, ...
        self.position = IteratorPosition(dataset.next_chunk + worker * self.n_groups, dataset.identity)
        self._source = source
        self._table: tuple[int, Any] | None = None  # number of its first chunk, table of chunks
        self._is_over = False

    def __iter__(self) -> "ChunkIterator":
        return self

    def __next__(self) -> Chunk:
        if self._is_over:
            raise StopIteration
        if self._source is None:
            self._source = self.dataset.open_source()
        source = self._source
        if self.position.identity not in (None, source.identity):
            raise ValueError(
                "the documents of the mixture have changed. Start a new run, or restore the documents."
            )
        self.position.identity = source.identity
        # the position excludes the group: state + group = chunk number
        number, step = self.position.next_chunk + self.dataset.group, self.n_groups * self.n_workers
        # consecutive chunks are read in one call; with other groups or workers they are not consecutive
        at_once = source.at_once if step == 1 else 1
        if self._table is None or not self._table[0] <= number < self._table[0] + at_once:
            self._table = number, source.read(number, at_once)
        # slice copies nothing, and is shorter or empty behind the end of the table
        rows = self._table[1].slice((number - self._table[0]) * source.chunk_size, source.chunk_size)
        self._is_over = len(rows) < source.chunk_size  # only the last chunk is shorter, or empty
        if not len(rows):
            raise StopIteration
        domains, documents = (rows.column(i).to_pylist() for i in (0, 1))
        if rows.column_names[1] == "sample":
            documents = [sample_to_document(record) for record in documents]
        # after everything that may raise: the state never skips a chunk that was not returned
        self.position.next_chunk += step
        return Chunk(number, source.identity, domains, documents)

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last returned chunk."""
        return {
            "next_chunk": self.position.next_chunk,
            "identity": self.position.identity,
            "n_groups": self.n_groups,
            "worker": [self.worker, self.n_workers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises ValueError for the state of another worker. With several workers it also raises ValueError for
        another number of groups.
        """
        if list(state["worker"]) != [self.worker, self.n_workers]:
            raise ValueError(
                "state of worker {} of {}: got worker {} of {}. Resume with as many workers as were saved."
                .format(*state["worker"], self.worker, self.n_workers)
            )  # fmt: skip
        # each worker advances by n_groups * n_workers chunks: other groups would skip or repeat chunks
        if self.n_workers > 1 and state["n_groups"] != self.n_groups:
            raise ValueError(
                f"state of {state['n_groups']} groups and {self.n_workers} workers: got {self.n_groups}. "
                "Resume with as many groups, or save without workers."
            )
        self.position.next_chunk, self.position.identity = state["next_chunk"], state["identity"]
        self._table, self._is_over = None, False
        self.dataset.next_chunk = self.dataset.first_chunk  # the epoch after the resumed one is complete
