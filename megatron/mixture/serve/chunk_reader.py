"""Samples of chunks in the units of the training: documents, windows of documents, or sequences of tokens.

A chunk has the documents of each domain in the mixture's shares. `ChunkReader` chooses at which level a
training loop meets these shares, as `chunk_reading_mixture_type` of Mixtera does:

    chunk    documents in the order of the chunk; the shares hold for the chunk
    window   documents reordered, so that each begin of the chunk has the shares to within one document, and
             any window of it to within two
    token    sequences of S + 1 tokens, each of one domain, in the shares of the documents; a chunk ends when
             a domain has no sequence left
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from megatron.mixture.serve.client import Chunk, MixtureDataset

LEVELS = ("chunk", "window", "token")


@dataclass(frozen=True)
class Sample:
    """One sample: a document, or int64 [S + 1] at the level of tokens.

    number  of its chunk
    index   in its chunk, from which a state resumes
    domain  index into the names of the source
    """

    number: int
    index: int
    domain: int
    content: Any


@dataclass(frozen=True)
class ChunkReader:
    """Reader of the samples of one chunk, a function of the chunk alone.

    seq_len        S; of sequences at the level of tokens
    eod            id that follows each document
    encode         text to ids; None: the documents are ids already, and no `eod` is added
    encode_batch   texts to ids at once, instead of `encode`: libraries use their threads for it
    overlap        sequences share one token, so that each token but the first is a target once; False: they
                   share none
    at_least_one   repeat the tokens of a domain that are less than a sequence, instead of an empty domain
    use_all        at the level of tokens: continue with the other domains when one has no sequence left, so
                   that no token of a whole sequence is lost and the shares hold up to there only
    """

    level: str = "chunk"
    seq_len: int | None = None
    eod: int | None = None
    encode: Callable[[str], list[int]] | None = None
    encode_batch: Callable[[list[str]], list[list[int]]] | None = field(default=None, kw_only=True)
    overlap: bool = field(default=True, kw_only=True)
    at_least_one: bool = field(default=True, kw_only=True)
    use_all: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level: got '{self.level}', expected one of {', '.join(LEVELS)}.")
        if self.level == "token" and (self.seq_len is None or self.seq_len < 1 or self.eod is None):
            raise ValueError("level token: got no seq_len or eod, expected both. Set them.")

    def read(self, chunk: Chunk) -> list[Sample]:
        """Return the samples of a chunk in their order."""
        if self.level == "token":
            return self._read_sequences(chunk)
        order = np.arange(len(chunk.domains))
        if self.level == "window":
            order = interleave_domains(np.array(chunk.domains, dtype=np.int64))
        return [
            Sample(chunk.number, index, chunk.domains[place], chunk.documents[place])
            for index, place in enumerate(order.tolist())
        ]

    def _read_sequences(self, chunk: Chunk) -> list[Sample]:
        domains = np.array(chunk.domains, dtype=np.int64)
        present, n_documents = np.unique(domains, return_counts=True)
        sequences = [self._pack_documents(chunk, np.flatnonzero(domains == k)) for k in present]
        n_most = sum(map(len, sequences))
        samples: list[Sample] = []
        for slot, nth in iter_shares(n_documents) if n_most else ():
            if nth < len(sequences[slot]):
                samples.append(Sample(chunk.number, len(samples), int(present[slot]), sequences[slot][nth]))
            elif not self.use_all:
                break
            if len(samples) == n_most:
                break
        return samples

    def _pack_documents(self, chunk: Chunk, places: np.ndarray) -> np.ndarray:
        """Return the whole sequences of some documents, int64 [n, S + 1]."""
        assert self.seq_len is not None, "checked at the beginning"
        documents = [chunk.documents[place] for place in places.tolist()]
        if self.encode_batch is not None:
            documents = [[*ids, self.eod] for ids in self.encode_batch(documents)]
        elif self.encode is not None:
            documents = [[*self.encode(text), self.eod] for text in documents]
        tokens = np.concatenate([np.empty(0, np.int64), *(np.asarray(ids, np.int64) for ids in documents)])
        # S = 3, T = 8: windows from 0 and 3 that share token 3, or from 0 and 4
        step = self.seq_len if self.overlap else self.seq_len + 1
        n = max(0, (len(tokens) - 1) // step if self.overlap else len(tokens) // step)
        if not n and len(tokens) and self.at_least_one:
            return np.resize(tokens, (1, self.seq_len + 1))  # repeats them
        return tokens[np.arange(n)[:, None] * step + np.arange(self.seq_len + 1)]


def iter_shares(counts: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (slot, its number so far) without end, so that every slot has its share of any begin.

    counts int64 [K]   above 0; shares are counts / sum(counts)

    After n turns each slot has had its share of them rounded down or up (quota method of Balinski and Young:
    among the slots that have begun a unit, the one that is due first; Tijdeman 1980).
    """
    counts = np.asarray(counts, dtype=np.int64)
    total, done, turn = int(counts.sum()), np.zeros(len(counts), dtype=np.int64), 0
    while True:
        turn += 1
        # turn n may give unit d of slot k if d < n c_k / total, that is, before it exceeds its upper quota
        begun = done * total < counts * turn
        # unit d + 1 is due at turn ceil((d + 1) total / c_k)
        due = -(-(done + 1) * total // counts)
        slot = int(np.argmin(np.where(begun, due, np.iinfo(np.int64).max)))
        yield slot, int(done[slot])
        done[slot] += 1


def interleave_domains(domains: np.ndarray) -> np.ndarray:
    """Return an order, int64 [n], of documents with these domains, so that each begin has the shares.

    Documents of one domain keep their order. The shares of a begin are right to within one document.
    """
    present, counts = np.unique(domains, return_counts=True)
    places = [np.flatnonzero(domains == k) for k in present]
    order = np.empty(len(domains), dtype=np.int64)
    shares = iter_shares(counts)
    for position in range(len(domains)):
        slot, nth = next(shares)
        order[position] = places[slot][nth]
    return order


class SampleStream(IterableDataset[Sample]):
    """Samples of the chunks of one data-parallel group, with a state between any two samples.

    For a DataLoader with batch_size=None and no workers, or as the iterator of a training loop. The chunks
    ahead are read and encoded in a thread. For processes instead, whose state is that of whole chunks:
    DataLoader(dataset, batch_size=None, num_workers=4, collate_fn=reader.read).
    """

    def __init__(self, dataset: MixtureDataset, reader: ChunkReader, prefetch_chunks: int = 1) -> None:
        """`prefetch_chunks`: chunks that are read and encoded ahead; 0: none, without a thread."""
        self.dataset, self.reader, self.prefetch_chunks = dataset, reader, prefetch_chunks
        self._state: dict[str, Any] = {
            "next_chunk": 0, "identity": None, "index": 0, "n_groups": dataset.n_groups,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last sample that was returned."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. Raises ValueError for one inside a chunk of another number of groups."""
        if state["n_groups"] != self.dataset.n_groups and state["index"]:
            raise ValueError(
                f"state: saved inside a chunk by {state['n_groups']} groups, got {self.dataset.n_groups}. "
                "Save at the end of a chunk, or resume with as many groups."
            )
        self._state = dict(state)

    def __iter__(self) -> Iterator[Sample]:
        if get_worker_info() is not None:
            raise ValueError(
                "SampleStream: got a worker of a DataLoader, expected none. Read MixtureDataset with "
                "workers, and pass ChunkReader.read as collate_fn."
            )
        first = self._state["index"]
        self.dataset.load_state_dict(
            {"next_chunk": self._state["next_chunk"], "identity": self._state["identity"]}
        )
        for chunk, samples in self._iter_chunks():
            position = self.dataset.state_dict(chunk)
            for sample in samples[first:]:
                is_last = sample.index + 1 == len(samples)
                # before the sample is returned, because the loop may save the state while it has the sample
                self._state = {
                    "next_chunk": position["next_chunk"] - (0 if is_last else self.dataset.n_groups),
                    "identity": position["identity"], "index": 0 if is_last else sample.index + 1,
                    "n_groups": self.dataset.n_groups,
                }  # fmt: skip
                yield sample
            first = 0

    def _iter_chunks(self) -> Iterator[tuple[Chunk, list[Sample]]]:
        chunks = iter(self.dataset)
        if not self.prefetch_chunks:
            yield from ((chunk, self.reader.read(chunk)) for chunk in chunks)
            return

        def read_next() -> tuple[Chunk, list[Sample]] | None:
            chunk = next(chunks, None)
            return None if chunk is None else (chunk, self.reader.read(chunk))

        # one thread: chunks are read in their order
        with ThreadPoolExecutor(1, thread_name_prefix="mixture-chunks") as executor:
            ahead: list[Future[tuple[Chunk, list[Sample]] | None]] = []
            while True:
                while len(ahead) <= self.prefetch_chunks:
                    ahead.append(executor.submit(read_next))
                item = ahead.pop(0).result()
                if item is None:
                    return
                yield item
