"""Chunks of documents for training loops of any kind, from this machine's disks or from a server."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
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
    that reads. The state is the next chunk of all groups together: it goes on with any number of groups.
    """

    def __init__(self, open_source: Callable[[], ChunkSource], group: int = 0, n_groups: int = 1) -> None:
        if not 0 <= group < n_groups:
            raise ValueError(f"group {group} of {n_groups}: wanted 0 to {n_groups - 1}")
        self.open_source, self.group, self.n_groups = open_source, group, n_groups
        self.next_chunk = 0
        self.identity: str | None = None

    def state_dict(self, consumed: Chunk | None = None) -> dict[str, Any]:
        """After training on `consumed` in every group; what was only fetched ahead does not count."""
        if consumed is None:
            return {"next_chunk": self.next_chunk, "identity": self.identity}
        rounds = consumed.number // self.n_groups + 1
        return {"next_chunk": rounds * self.n_groups, "identity": consumed.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, of any number of groups."""
        self.next_chunk, self.identity = state["next_chunk"], state["identity"]

    def __iter__(self) -> Iterator[Chunk]:
        worker = get_worker_info()
        return self.chunks() if worker is None else self.chunks(worker.id, worker.num_workers)

    def chunks(
        self, worker: int = 0, n_workers: int = 1, source: ChunkSource | None = None
    ) -> Iterator[Chunk]:
        """Those of one of several processes that read by turns, from `source` or from one of their own."""
        source = source or self.open_source()
        if self.identity not in (None, source.identity):
            raise ValueError("the documents of the mixture have changed; begin anew, or bring them back")
        number, step = self.next_chunk + self.group + worker * self.n_groups, self.n_groups * n_workers
        held: tuple[int, Any] | None = None
        while True:
            at_once = source.at_once if step == 1 else 1
            if held is None or not held[0] <= number < held[0] + at_once:
                held = number, source.read(number, at_once)
            rows = held[1].slice((number - held[0]) * source.chunk_size, source.chunk_size)
            if len(rows) < source.chunk_size:
                return
            domains, documents = (rows.column(i).to_pylist() for i in (0, 1))
            if rows.column_names[1] == "sample":
                documents = [as_document(told) for told in documents]
            yield Chunk(number, source.identity, domains, documents)
            number += step
