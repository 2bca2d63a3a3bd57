"""Loaders of mixtures for other training loops: torch, torchdata, Hugging Face `datasets`.

A state is the number of the next chunk over all groups,
with a position from which it is computed. It is equal
on every rank and resumes on any number of groups.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

PADDING = -1  # domain of a target that is not a token of a document
# age of a state's position, in chunks, which take about 0.1 s to compute again
ANCHOR_CHUNKS = 4096
# progress: the next round of all groups, an earlier position, from which it is
# computed, and the identity of the source
START: dict[str, Any] = {"next_chunk": 0, "position": None, "identity": None}
CHANGED = "the documents of the mixture have changed. Start a new run, or restore the documents."


class ChunkSource(Protocol):
    """Source of chunks: documents.DocumentChunks locally, client.RemoteChunks from a server."""

    chunk_size: int
    identity: str
    names: tuple[str, ...]
    at_once: int  # chunks to read per call; 1 if the next chunk may wait for losses

    def read(self, first: int, n_chunks: int, position: dict[str, Any] | None = None) -> Any:
        """Return an Arrow table with domain and text; fewer rows if the data end.

        position   of an earlier chunk, from which the chunks are computed;
                   None: the start
        """
        ...

    def find_position(self, chunk: int, position: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the position before a chunk, computed from an earlier one."""
        ...

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report the loss on a chunk: nats and tokens of each domain, float64 [K].

        Returns False if no weights follow from it.
        """
        ...


@dataclass(frozen=True)
class Chunk:
    """Documents of one chunk, with their domains (indices into `names` of the source).

    state   of the dataset after this chunk and those that the other groups read
            at the same time
    """

    number: int
    domains: list[int]
    documents: list[Any]
    state: dict[str, Any]


def pack_windows(
    chunk: Chunk, seq_len: int, eod: int, encode: Callable[[str], list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the documents of a chunk, each followed by `eod`, and cut windows of S + 1 tokens.

    encode   text to ids

    Returns windows int64 [n, S + 1], where neighbours share one token, and the
    domain of each target, int32 [n, S]. The last window is padded with `eod`,
    whose domain is PADDING. A chunk is packed independently of the others, and
    no token is dropped.
    """
    documents = [np.array([*encode(text), eod], dtype=np.int64) for text in chunk.documents]
    # the empty array allows a chunk without documents, and sets the type
    tokens = np.concatenate([*documents, np.empty(0, np.int64)])
    domains = np.repeat(np.array(chunk.domains, dtype=np.int32), [len(document) for document in documents])
    # T tokens have T - 1 targets; ceil((T - 1) / S) windows cover them.
    # Example: S = 3, T = 8: 7 targets, n = 3 windows from 0, 3 and 6, of 10
    # tokens with 2 of padding.
    n = -(-max(0, len(tokens) - 1) // seq_len)
    padded = np.full(n * seq_len + 1, eod, dtype=np.int64)
    padded_domains = np.full(n * seq_len + 1, PADDING, dtype=np.int32)
    padded[: len(tokens)], padded_domains[: len(tokens)] = tokens[: len(padded)], domains[: len(padded)]
    # [n, S + 1]: window w starts at w S
    # and shares its last token with window w + 1
    positions = np.arange(n)[:, None] * seq_len + np.arange(seq_len + 1)
    # a target counts for the domain of its document, even if the inputs of the
    # window are of another
    return padded[positions], padded_domains[positions[:, 1:]]


def _read_progress(state: dict[str, Any]) -> dict[str, Any]:
    """Return the progress in a state.

    States of earlier versions have no position.
    """
    identity, position = state["identity"], state.get("position")
    return {"next_chunk": state["next_chunk"], "position": position, "identity": identity}


class MixtureDataset(IterableDataset[Chunk]):
    """Chunks of one data-parallel group. Round r of n groups is chunks first + r n to first + r n + n - 1.

    For a DataLoader with batch_size=None and any number of workers: the order
    is the same. Ranks of one group (tensor, pipeline, context) pass the same
    `group` and get the same chunks. `open_source` is called in the process that
    reads. `parse` is called with each document, for example to take the text
    out of a record. Workers of a process that has opened a mixture itself need
    multiprocessing_context="spawn" or "forkserver": the threads that read do
    not survive a fork.

    torchdata's StatefulDataLoader saves and restores the iterators
    (`ChunkIterator`), also in its workers. A plain DataLoader does not: pass
    the last trained chunk to `state_dict`.
    """

    def __init__(
        self, open_source: Callable[[], ChunkSource], group: int = 0, n_groups: int = 1,
        parse: Callable[[Any], Any] | None = None,
    ) -> None:  # fmt: skip
        if not 0 <= group < n_groups:
            raise ValueError(f"group: got {group} of {n_groups}, expected 0 to {n_groups - 1}.")
        self.open_source, self.group, self.n_groups, self.parse = open_source, group, n_groups, parse
        # progress of the next iterator, and of the epochs of a
        # StatefulDataLoader; `start` applies to the resumed one only
        self.start = self.first = START
        # progress of the latest iterator of this process
        self._latest: dict[str, Any] | None = None
        # 1 if the iterators are in other processes.
        # In shared memory: __iter__ sets it in a worker process,
        # and state_dict reads it in the main process.
        self._in_workers = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the progress of an iterator, which stays in its process."""
        return self.__dict__ | {"_latest": None}

    def state_dict(self, consumed: Chunk | None = None) -> dict[str, Any]:
        """Return the state after training on `consumed` in every group. Prefetched chunks do not count.

        Without `consumed`, the state is behind the last chunk that this process
        returned. Raises ValueError if worker processes read the chunks, because
        this process cannot tell prefetched from trained chunks.
        """
        if consumed is not None:
            return dict(consumed.state)
        if get_worker_info() is None and int(self._in_workers):
            raise ValueError(
                "state_dict() of a dataset that worker processes read: got no chunk, expected the last one "
                "that was trained on. Call state_dict(chunk), or save the state of a StatefulDataLoader."
            )
        return {**(self._latest or self.start), "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that was saved by any number of groups."""
        self.start = _read_progress(state)
        # a state of state_dict(chunk) has no first chunk: later epochs begin at
        # the same chunk then
        self.first = _read_progress(state.get("first", state))
        self._latest = None
        self._in_workers.zero_()

    def __iter__(self) -> "ChunkIterator":
        worker = get_worker_info()
        iterator = ChunkIterator(self, *(() if worker is None else (worker.id, worker.num_workers)))
        self._latest = iterator.progress
        self._in_workers.fill_(worker is not None)
        return iterator


class ChunkIterator(Iterator[Chunk]):
    """Chunks of one worker of a `MixtureDataset`, with the state that StatefulDataLoader saves.

    The first chunk opens the source, if it is None. The progress excludes the
    group, so that every rank of a job can load the state of any other rank.
    """

    def __init__(
        self, dataset: MixtureDataset, worker: int = 0, n_workers: int = 1,
        source: ChunkSource | None = None,
    ) -> None:  # fmt: skip
        self.dataset, self.worker, self.n_workers = dataset, worker, n_workers
        self.n_groups = dataset.n_groups
        # 2 groups, 3 workers, group 1: worker 0 reads chunks 1, 7, 13, worker 1
        # reads 3, 9, 15, and worker 2 reads 5, 11, 17. A DataLoader takes the
        # workers in turn, so that the order is 1, 3, 5, 7, ...
        first = dataset.start["next_chunk"] + worker * self.n_groups
        self.progress = dataset.start | {"next_chunk": first}
        self._source = source
        # number of its first chunk, table of chunks
        self._table: tuple[int, Any] | None = None
        self._is_over = False

    def __next__(self) -> Chunk:
        if self._is_over:
            raise StopIteration
        if self._source is None:
            self._source = self.dataset.open_source()
        source, progress = self._source, self.progress
        if progress["identity"] not in (None, source.identity):
            raise ValueError(CHANGED)
        first, step = progress["next_chunk"], self.n_groups * self.n_workers
        number = first + self.dataset.group
        rows = self._read_chunk(source, number, step)
        # only the last chunk is shorter, or empty
        self._is_over = len(rows) < source.chunk_size
        if not len(rows):
            raise StopIteration
        domains, documents = (rows.column(i).to_pylist() for i in (0, 1))
        if self.dataset.parse is not None:
            documents = list(map(self.dataset.parse, documents))
        # rounds are multiples of n_groups from the start, so that the positions
        # are equal on every rank
        round_end, position = first + self.n_groups, progress["position"]
        if round_end - (position or {"chunk": 0})["chunk"] >= ANCHOR_CHUNKS and not self._is_over:
            position = source.find_position(round_end, position)
        # after everything that may raise: the state never skips a chunk that
        # was not returned
        state = {"next_chunk": round_end, "position": position, "identity": source.identity}
        progress.update(state, next_chunk=first + step)
        return Chunk(number, domains, documents, state)

    def _read_chunk(self, source: ChunkSource, number: int, step: int) -> Any:
        # consecutive chunks are read in one call; with other groups or workers
        # they are not consecutive
        at_once = source.at_once if step == 1 else 1
        if self._table is None or not self._table[0] <= number < self._table[0] + at_once:
            self._table = number, source.read(number, at_once, self.progress["position"])
        # slice copies nothing, and is shorter
        # or empty behind the end of the table
        return self._table[1].slice((number - self._table[0]) * source.chunk_size, source.chunk_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state behind the last returned chunk."""
        worker = {"n_groups": self.n_groups, "worker": [self.worker, self.n_workers]}
        return self.progress | worker

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises ValueError for the state of another worker. With several workers
        it also raises ValueError for another number of groups.
        """
        if list(state["worker"]) != [self.worker, self.n_workers]:
            raise ValueError(
                "state of worker {} of {}: got worker {} of {}. Resume with as many workers as were saved."
                .format(*state["worker"], self.worker, self.n_workers)
            )  # fmt: skip
        # each worker advances by n_groups * n_workers chunks: other groups
        # would skip or repeat chunks
        if self.n_workers > 1 and state["n_groups"] != self.n_groups:
            raise ValueError(
                f"state of {state['n_groups']} groups and {self.n_workers} workers: got {self.n_groups}. "
                "Resume with as many groups, or save without workers."
            )
        # in place: the dataset refers to the progress of its latest iterator
        self.progress.update(_read_progress(state))
        self._table, self._is_over = None, False
        # the epoch after the resumed one is complete
        self.dataset.start = self.dataset.first


def hugging_face(dataset: MixtureDataset) -> Any:
    """Return the documents of one group as a `datasets.IterableDataset`, in their order.

    Columns: text; domain (its name); chunk (its number). Its `state_dict` is a
    position, from which it resumes without replaying documents. A state saved at the
    end of a chunk resumes on any number of groups. In a DataLoader the first worker reads and the others
    idle, so that the order is as in one process. `shuffle` shuffles the
    buffer of `datasets` only.
    """
    import datasets

    return datasets.IterableDataset(_open_examples(dataset))


class DocumentExamples:
    """Documents of a mixture as one shard for `datasets`. `_open_examples` adds the base class."""

    num_shards = 1
    sleep_on_threads_shutdown = False
    _state_dict: dict[str, Any] | None

    def __init__(self, dataset: MixtureDataset) -> None:
        super().__init__()
        self.dataset = dataset

    def __reduce__(self) -> tuple[Any, ...]:
        # the class is made at run time, so that pickle cannot find it by name
        return _open_examples, (self.dataset, self._state_dict)

    def _init_state_dict(self) -> dict[str, Any]:
        place = {"document": 0, "n_groups": self.dataset.n_groups, "type": type(self).__name__}
        self._state_dict = self.dataset.start | place
        return self._state_dict

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        state = self._state_dict or self._init_state_dict()
        dataset = copy(self.dataset)  # the dataset of the caller must not move
        if state["n_groups"] != dataset.n_groups and state["document"]:
            raise ValueError(
                f"state: saved inside a chunk by {state['n_groups']} groups, got {dataset.n_groups} groups. "
                "Save at the end of a chunk, or resume with as many groups."
            )
        state["n_groups"] = dataset.n_groups
        dataset.start = _read_progress(state)
        source = dataset.open_source()
        for chunk in ChunkIterator(dataset, source=source):
            state["identity"] = chunk.state["identity"]
            # above 0 in the first chunk after a resume only
            for index in range(state["document"], len(chunk.documents)):
                last = index + 1 == len(chunk.documents)
                # before the row is yielded, because the consumer may save the
                # state while it has the row
                state["document"] = 0 if last else index + 1
                if last:
                    # the first round after this one, from which any number of
                    # groups can resume
                    state |= chunk.state
                row = {"text": chunk.documents[index], "domain": source.names[chunk.domains[index]]}
                yield f"{chunk.number}-{index}", row | {"chunk": chunk.number}

    def shuffle_data_sources(self, *_: Any, **_options: Any) -> "DocumentExamples":
        """Return self: the only shard, whose documents the mixture has shuffled within domains."""
        return self

    shard_data_sources = reshard_data_sources = shuffle_data_sources


def _open_examples(dataset: MixtureDataset, state: dict[str, Any] | None = None) -> Any:
    """Return `DocumentExamples` with its base class, whose import takes seconds."""
    from datasets.iterable_dataset import _BaseExamplesIterable

    examples: Any = type("Documents", (DocumentExamples, _BaseExamplesIterable), {})(dataset)
    examples._state_dict = state
    return examples
