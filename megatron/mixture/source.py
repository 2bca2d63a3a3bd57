"""Samples of a mixture: windows of S + 1 tokens, domain by domain, as megatron/data/samples.py has them.

The stream of a domain is its documents one after another, in an order of its own each epoch, cut every S
tokens; neighbours share one token. Which domain a sample is of, the distributor says.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.mixture_use import folder_of, read_resolved
from megatron.data.indexed import IndexedTokens, check_ids
from megatron.mixture.adaptive import Log
from megatron.mixture.chunk import Orders, Position, Turns
from megatron.mixture.distributor import Distributor
from megatron.mixture.query import Result
from megatron.mixture.recent import Recent
from megatron.mixture.spec import DOCUMENTS, read_spec, weights_over_time

EPOCHS_KEPT = 2  # of a domain: those who read at once are in neighbouring ones
MOST_PAIRS = 64  # mapped at a time
BLOCK = 64  # documents: their ends are found anew for each window
BLOCKS_AT_ONCE = 1 << 10


def mapped_pairs() -> Recent:
    """Pairs of which the latest used are mapped: each takes two open files."""
    return Recent(MOST_PAIRS, lambda pair: pair.unmap())


class DomainStream:
    """The windows of one domain.

    Keeps 13 to 16 bytes a document (its pair, first token and length), and 1/8 byte for each of the latest
    epochs: the order of an epoch is computed again, a block at a time, where it is needed.
    """

    def __init__(
        self, name: str, pairs: Sequence[IndexedTokens], spans: np.ndarray,
        seq_len: int, seed: int, shuffle: bool, mapped: Recent | None = None,
    ) -> None:  # fmt: skip
        """spans int64 [n, 3]: (pair, first document, the one after the last) of each interval.

        `mapped`: pairs that are mapped at a time, shared by the domains of a mixture.
        """
        self.pairs, self.seq_len = pairs, seq_len
        self._mapped = mapped or mapped_pairs()
        sizes = spans[:, 2] - spans[:, 1]
        n = int(sizes.sum())
        documents = np.arange(n) + np.repeat(spans[:, 1] - np.cumsum(sizes) + sizes, sizes)
        self.files = np.repeat(spans[:, 0].astype(np.min_scalar_type(len(pairs))), sizes)
        self.begins, self.lengths = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int32)
        for pair in np.unique(self.files):
            here = self.files == pair
            self.begins[here], self.lengths[here] = self._pair(pair).document_spans(documents[here])
        self.n_tokens = int(self.lengths.sum(dtype=np.int64))
        self.n_windows = max(0, (self.n_tokens - 1) // seq_len)
        self.orders = Orders(np.array([len(self.lengths)]), [name], seed, shuffle)
        self._epochs: dict[int, np.ndarray] = {}

    def copy_windows(
        self, numbers: np.ndarray, rows: Sequence[np.ndarray], positions: Sequence[np.ndarray] | None = None
    ) -> None:
        """Windows int64 [n], over all epochs, into rows of S + 1.

        Into `positions`, rows of S + 1 as well: the place of each token in its document, or in the window
        where the document began before it.
        """
        for i, number in enumerate(numbers.tolist()):
            epoch, window = divmod(number, self.n_windows)
            filled, row = 0, rows[i]
            for document, skipped in self._documents_from(epoch, window * self.seq_len):
                begin = int(self.begins[document]) + skipped
                n = min(int(self.lengths[document]) - skipped, len(row) - filled)
                row[filled : filled + n] = self._pair(self.files[document]).tokens[begin : begin + n]
                if positions is not None:
                    positions[i][filled : filled + n] = np.arange(n)
                filled += n
                if filled == len(row):
                    break

    def _pair(self, number: int) -> IndexedTokens:
        return self._mapped.get(int(number), lambda: (self.pairs[number], 1))

    def _documents_from(self, epoch: int, token: int) -> Iterator[tuple[int, int]]:
        """(document, its tokens before the window) of an epoch from the one that holds token `token` on."""
        ends = self._block_ends(epoch)
        block = int(np.searchsorted(ends, token, side="right"))
        before = token - (int(ends[block - 1]) if block else 0)  # tokens of the block before the window
        for first in range(block * BLOCK, len(self.lengths), BLOCK):
            order = self.document_order(epoch, first, BLOCK)
            place = 0
            if before:
                own = np.cumsum(self.lengths[order], dtype=np.int64)
                place = int(np.searchsorted(own, before, side="right"))
                before -= int(own[place - 1]) if place else 0
            for document in order[place:].tolist():
                yield document, before
                before = 0

    def document_order(self, epoch: int, first: int, n: int) -> np.ndarray:
        """Documents number first, first + 1, ... of an epoch, int64, `n` or up to its end."""
        n_documents = len(self.lengths)
        numbers = np.arange(first, min(first + n, n_documents)) + epoch * n_documents
        return self.orders.units(Turns(np.zeros(len(numbers), dtype=np.int32), numbers))

    def _block_ends(self, epoch: int) -> np.ndarray:
        """Tokens up to the end of each block of documents of an epoch, int64."""
        known = self._epochs.get(epoch)
        if known is None:
            sums = [
                np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK), dtype=np.int64)
                for first in range(0, len(self.lengths), BLOCK * BLOCKS_AT_ONCE)
                for lengths in [self.lengths[self.document_order(epoch, first, BLOCK * BLOCKS_AT_ONCE)]]
            ]
            known = np.cumsum(np.concatenate(sums))
            recent = {e: ends for e, ends in self._epochs.items() if abs(e - epoch) < EPOCHS_KEPT}
            self._epochs = recent | {epoch: known}  # a new one: another thread may be reading the old
        return known


class MixtureSamples:
    """As `Samples`, over the domains of a prepared mixture. A chunk is a step's batch.

    names     of the domains
    identity  of the documents, the mixture's file and the tokenizer
    rule      what finds the weights; None: they do not follow the model
    n_ids     of the model that reads them: a sample with another id is a ValueError; None: not looked at
    """

    n_ids: int | None = None

    def __init__(self, path: str | Path, seq_len: int, batch_size: int, seed: int) -> None:
        """FileNotFoundError for a mixture that is not prepared; ValueError for a registered pair that has
        changed, and for a domain without a window."""
        spec, resolved = read_spec(path), read_resolved(path)
        result = Result.load(folder_of(path) / DOCUMENTS)
        self.identity = resolved.identity
        for file in result.files:
            if file.path.endswith(".bin"):
                file.unchanged()
        pairs = [IndexedTokens(prefix) for prefix in resolved.pairs]
        columns = [result.column(name) for name in ("file", "begin", "end")]
        spans = np.column_stack(columns).astype(np.int64)
        bounds = np.searchsorted(result.column("domain"), np.arange(len(resolved.domains) + 1))
        shuffle = spec.told.get("shuffle", True)
        self.seq_len, self.batch_size, self.names = seq_len, batch_size, resolved.domains
        self.tokens = np.array(resolved.tokens)
        mapped = mapped_pairs()
        self.streams = [
            DomainStream(name, pairs, spans[bounds[k] : bounds[k + 1]], seq_len, seed, shuffle, mapped)
            for k, name in enumerate(self.names)
        ]
        self.weights, self.rule = weights_over_time(spec, result, self.tokens, batch_size * seq_len)
        self.every_steps, self.delay_steps = (
            (0, 0) if spec.adaptive is None else (spec.adaptive["every_steps"], spec.adaptive["delay_steps"])
        )
        self.distributor = Distributor(
            [stream.n_windows for stream in self.streams],
            self.names,
            self.weights,
            batch_size,
            seed,
            spec.told.get("dry", "repeat"),
        )
        self.samples_per_epoch = sum(stream.n_windows for stream in self.streams)
        self._finder = ThreadPoolExecutor(1, thread_name_prefix="mixture-weights")
        self._settling = threading.Lock()
        self._coming: tuple[Future[np.ndarray], int] | None = None  # and how far they will be known
        if isinstance(self.weights, Log):
            self.weights.coming = self.settle

    def domains_of(self, numbers: np.ndarray) -> np.ndarray:
        """The domain of samples int64 [n]: int32 [n]."""
        return self.distributor.take(numbers).domain

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Samples int64 [n]: int64 [n, seq_len + 1]. ValueError behind the end of a mixture that stops."""
        return self._take(numbers, None)

    def take_with_positions(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`take`, and of each token its place in its document, int64 [n, seq_len + 1].

        A document that began before the window counts from the window's begin, so that no position reaches
        seq_len + 1 and a 0 stands where a document, or the window, begins.
        """
        positions = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        return self._take(numbers, positions), positions

    def _take(self, numbers: np.ndarray, positions: np.ndarray | None) -> np.ndarray:
        turns = self.distributor.take(numbers)
        taken = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        for k in np.unique(turns.domain).tolist():
            rows = np.flatnonzero(turns.domain == k)
            if not self.streams[k].n_windows:
                raise ValueError(
                    f"domain '{self.names[k]}': {self.streams[k].n_tokens:,} tokens hold no window of "
                    f"{self.seq_len} + 1; lower dataset.seq_len or give it no weight"
                )
            own = None if positions is None else [positions[row] for row in rows]
            self.streams[k].copy_windows(turns.number[rows], [taken[row] for row in rows], own)
            if self.n_ids is not None:
                check_ids(taken[rows], self.n_ids, f"domain '{self.names[k]}'")
        return taken

    def __getitem__(self, i: int) -> np.ndarray:
        """Sample i: int64 [seq_len + 1]."""
        return self.take(np.array([i]))[0]

    def counts(self, n_samples: int) -> list[int]:
        """How many of the first `n_samples` (whole steps) each domain has."""
        return self.distributor.position(n_samples // self.batch_size).done.tolist()

    def weights_at(self, step: int) -> list[float]:
        """Of each domain, for a step that is known."""
        weights = self.weights.at(step)[0]
        return (weights / weights.sum()).tolist()

    def observe(self, step: int, nats: np.ndarray, tokens: np.ndarray) -> None:
        """What the model lost on each domain (float64 [K], over `tokens` [K]) in a step; only every_steps-th
        ones count. The weights that follow from it begin delay_steps later, whatever is made ahead; they are
        found in a thread, and waited for by the first who needs them."""
        assert self.rule is not None and isinstance(self.weights, Log), "the weights follow the model"
        self.settle()
        coming = self._finder.submit(self.rule.observe, (step + 1) * self.batch_size, nats, tokens)
        with self._settling:
            self._coming = coming, step + self.every_steps + self.delay_steps

    def settle(self) -> None:
        """Wait for weights that are being found. Raises what the rule raised."""
        with self._settling:
            if self._coming is None:
                return
            (found, known_to), self._coming = self._coming, None
            assert isinstance(self.weights, Log) and self.weights.known_to is not None, "weights are found"
            self.weights.append(self.weights.known_to, found.result(), known_to)

    def state(self, step: int) -> dict[str, Any]:
        """All that is needed to go on at a step, for JSON."""
        self.settle()
        told: dict[str, Any] = {"position": self.distributor.position(step).as_dict()}
        if isinstance(self.weights, Log) and self.rule is not None:
            told |= {"log": self.weights.as_dict(step), "rule": self.rule.as_dict()}
        return told

    def restore(self, told: dict[str, Any]) -> None:
        """Undo `state`. ValueError for the state of another mixture."""
        self.settle()
        if isinstance(self.weights, Log) and self.rule is not None:
            self.weights.restore(told["log"])
            self.rule.restore(told["rule"])
        self.distributor.restore(Position.from_dict(told["position"]))
