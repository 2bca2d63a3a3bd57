"""Samples of a mixture: windows of S + 1 tokens, domain by domain, as megatron/data/samples.py has them.

The stream of a domain is its documents one after another, in an order of its own each epoch, cut every S
tokens; neighbours share one token. Which domain a sample is of, the distributor says.
"""

import threading
from collections.abc import Sequence
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
from megatron.mixture.spec import DOCUMENTS, read_spec, weights_over_time

HELD_EPOCHS = 2  # of a domain: those who read at once are in neighbouring ones


class DomainStream:
    """The windows of one domain. Holds some 28 bytes a document."""

    def __init__(
        self, name: str, pairs: Sequence[IndexedTokens], spans: np.ndarray,
        seq_len: int, seed: int, shuffle: bool,
    ) -> None:  # fmt: skip
        """spans int64 [n, 3]: (pair, first document, the one after the last) of each interval."""
        self.pairs, self.seq_len = pairs, seq_len
        sizes = spans[:, 2] - spans[:, 1]
        n = int(sizes.sum())
        documents = np.arange(n) + np.repeat(spans[:, 1] - np.cumsum(sizes) + sizes, sizes)
        self.files = np.repeat(spans[:, 0].astype(np.int32), sizes)
        self.begins, self.lengths = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int32)
        for pair in np.unique(self.files):
            here = self.files == pair
            self.begins[here], self.lengths[here] = pairs[pair].document_spans(documents[here])
        self.n_tokens = int(self.lengths.sum(dtype=np.int64))
        self.n_windows = max(0, (self.n_tokens - 1) // seq_len)
        self.orders = Orders(np.array([len(self.lengths)]), [name], seed, shuffle)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def copy_windows(self, numbers: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        """Windows int64 [n], over all epochs, into rows of S + 1."""
        for number, row in zip(numbers.tolist(), rows, strict=True):
            epoch, window = divmod(number, self.n_windows)
            order, ends = self._epoch(epoch)
            at = window * self.seq_len
            place = int(np.searchsorted(ends, at, side="right"))
            filled = 0
            while filled < len(row):
                document = int(order[place])
                left = int(ends[place]) - at
                begin = int(self.begins[document]) + int(self.lengths[document]) - left
                n = min(left, len(row) - filled)
                row[filled : filled + n] = self.pairs[self.files[document]].tokens[begin : begin + n]
                filled, at, place = filled + n, at + n, place + 1

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(documents in their order, tokens up to the end of each) of an epoch."""
        found = self._epochs.get(epoch)
        if found is None:
            n = len(self.lengths)
            numbers = np.arange(epoch * n, (epoch + 1) * n)
            order = self.orders.units(Turns(np.zeros(n, dtype=np.int32), numbers))
            found = order, np.cumsum(self.lengths[order], dtype=np.int64)
            kept = {e: held for e, held in self._epochs.items() if abs(e - epoch) < HELD_EPOCHS}
            self._epochs = kept | {epoch: found}  # a new one: another thread may be reading the old
        return found


class MixtureSamples:
    """As `Samples`, over the domains of a prepared mixture. A chunk is a step's batch.

    names   of the domains
    rule    what finds the weights; None: they do not follow the model
    n_ids   of the model that reads them: a sample with another id is a ValueError; None: not looked at
    """

    n_ids: int | None = None

    def __init__(self, path: str | Path, seq_len: int, batch_size: int, seed: int) -> None:
        """FileNotFoundError for a mixture that is not prepared; ValueError for a domain without a window."""
        spec, resolved = read_spec(path), read_resolved(path)
        result = Result.load(folder_of(path) / DOCUMENTS)
        pairs = [IndexedTokens(prefix) for prefix in resolved.pairs]
        columns = [result.column(name) for name in ("file", "begin", "end")]
        spans = np.column_stack(columns).astype(np.int64)
        bounds = np.searchsorted(result.column("domain"), np.arange(len(resolved.domains) + 1))
        shuffle = spec.told.get("shuffle", True)
        self.seq_len, self.batch_size, self.names = seq_len, batch_size, resolved.domains
        self.tokens = np.array(resolved.tokens)
        self.streams = [
            DomainStream(name, pairs, spans[bounds[k] : bounds[k + 1]], seq_len, seed, shuffle)
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
        turns = self.distributor.take(numbers)
        taken = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        for k in np.unique(turns.domain).tolist():
            rows = np.flatnonzero(turns.domain == k)
            if not self.streams[k].n_windows:
                raise ValueError(
                    f"domain '{self.names[k]}': {self.streams[k].n_tokens:,} tokens hold no window of "
                    f"{self.seq_len} + 1; lower dataset.seq_len or give it no weight"
                )
            self.streams[k].copy_windows(turns.number[rows], [taken[row] for row in rows])
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
