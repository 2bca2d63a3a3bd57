"""Samples of a mixture: windows of S + 1 tokens of each domain, as in megatron/data/samples.py.

The stream of a domain is the concatenation of its documents, in a different
order in each epoch. It is cut every S tokens, and neighbouring windows share
one token. The distributor assigns the domain of each sample.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data import open_dataset
from megatron.data.batches import SampleSource
from megatron.data.indexed import IndexedTokens, check_ids
from megatron.mixture.distributor import ChunkUnits, Distributor, Position, UnitOrder
from megatron.mixture.files import Pool
from megatron.mixture.query import Selection, documents_path
from megatron.mixture.spec import build_step_weights, read_spec
from megatron.plan.mixture_use import read_resolved

EPOCHS_KEPT = 3  # per domain: concurrent readers are in adjacent epochs
MAX_MAPPED = 64  # datasets mapped at a time; each takes two open files
BLOCK_DOCUMENTS = 64  # per block; ends within it are computed for each window
BLOCKS_AT_ONCE = 1 << 10
STATE_KEY = "mixture"  # the only key of torchtitan's state


class DomainStream:
    """The windows of one domain.

    `files`, `begins` and `lengths` are the dataset, first token and length of each
    document: pages of the mixture's Arrow file, which the processes of a machine
    share. Each process keeps 1/8 byte per document for each of the latest epochs.
    """

    def __init__(
        self, name: str, datasets: Sequence[IndexedTokens], files: np.ndarray, begins: np.ndarray,
        lengths: np.ndarray, seq_len: int, seed: int, shuffle: bool, mapped: Pool,
    ) -> None:  # fmt: skip
        """`mapped`: cache of mapped datasets that the domains of a mixture share."""
        self.datasets, self.seq_len, self._mapped = datasets, seq_len, mapped
        self.files, self.begins, self.lengths = files, begins, lengths
        self.n_tokens = int(lengths.sum(dtype=np.int64))
        # T tokens have T - 1 targets: window w has tokens w S to w S + S
        self.n_windows = max(0, (self.n_tokens - 1) // seq_len)
        self.orders = UnitOrder(np.array([len(lengths)]), [name], seed, shuffle)
        self._load_block_ends = lru_cache(EPOCHS_KEPT)(self._compute_block_ends)

    def copy_windows(
        self, numbers: np.ndarray, rows: Sequence[np.ndarray], positions: Sequence[np.ndarray] | None = None
    ) -> None:
        """Copy windows int64 [n], numbered over all epochs, into rows of S + 1."""
        for i, number in enumerate(numbers.tolist()):
            # an epoch ends with its last whole window
            epoch, window = divmod(number, self.n_windows)
            filled, row = 0, rows[i]
            for document, skipped in self._iter_documents(epoch, window * self.seq_len):
                begin = int(self.begins[document]) + skipped
                n = min(int(self.lengths[document]) - skipped, len(row) - filled)
                dataset = self._get_dataset(self.files[document])
                row[filled : filled + n] = dataset.tokens[begin : begin + n]
                if positions is not None:
                    positions[i][filled : filled + n] = np.arange(n)
                filled += n
                if filled == len(row):
                    break

    def _get_dataset(self, number: int) -> IndexedTokens:
        return self._mapped.get(int(number), lambda: self.datasets[number])

    def _iter_documents(self, epoch: int, token: int) -> Iterator[tuple[int, int]]:
        """Yield (document, its tokens before the window) of an epoch.

        The first document contains token `token`.
        """
        ends = self._load_block_ends(epoch)
        # The block with the token; its documents are searched below.
        # `right`: a token at the end of a block is the first of the next one.
        block = int(np.searchsorted(ends, token, side="right"))
        # tokens of the block that precede the window
        before = token - (int(ends[block - 1]) if block else 0)
        for first in range(block * BLOCK_DOCUMENTS, len(self.lengths), BLOCK_DOCUMENTS):
            order = self.compute_document_order(epoch, first, BLOCK_DOCUMENTS)
            place = 0
            if before:
                # tokens up to the end of each document of the block; `right`
                # skips documents without tokens
                sums = np.cumsum(self.lengths[order], dtype=np.int64)
                place = int(np.searchsorted(sums, before, side="right"))
                before -= int(sums[place - 1]) if place else 0
            for document in order[place:].tolist():
                # only the first document of a window may begin before it
                yield document, before
                before = 0

    def compute_document_order(self, epoch: int, first: int, n: int) -> np.ndarray:
        """Return documents first to first + n - 1 of an epoch, int64; fewer at its end."""
        n_documents = len(self.lengths)
        # as in UnitOrder: number = epoch * documents + position in the epoch
        numbers = np.arange(first, min(first + n, n_documents)) + epoch * n_documents
        return self.orders.lookup_units(ChunkUnits(np.zeros(len(numbers), dtype=np.int32), numbers))

    def _compute_block_ends(self, epoch: int) -> np.ndarray:
        """Return the tokens up to the end of each block of an epoch's documents, int64."""
        ends, n_at_once = [np.zeros(1, dtype=np.int64)], BLOCK_DOCUMENTS * BLOCKS_AT_ONCE
        # 2^16 documents at a time, so that the order
        # of a whole epoch is never in memory
        for first in range(0, len(self.lengths), n_at_once):
            lengths = self.lengths[self.compute_document_order(epoch, first, n_at_once)]
            sums = np.add.reduceat(lengths, np.arange(0, len(lengths), BLOCK_DOCUMENTS), dtype=np.int64)
            ends.append(ends[-1][-1] + np.cumsum(sums))
        return np.concatenate(ends[1:])


class MixtureSamples(SampleSource):
    """Samples of a prepared mixture. A chunk is the batch of a step.

    names     names of the domains
    identity  hash of the documents, the mixture's file and the tokenizer
    rule      computes the weights; None: they do not follow the model
    n_ids     vocabulary size of the model, which no id may reach; None: no check
    """

    n_ids: int | None = None

    def __init__(self, path: str | Path, seq_len: int, batch_size: int, seed: int) -> None:
        """Open a prepared mixture.

        Raises FileNotFoundError if it is not prepared, and ValueError for a
        registered dataset that has changed and for a domain without a window.
        """
        spec, resolved = read_spec(path), read_resolved(path)
        self.identity = resolved.identity
        selection = Selection.load(documents_path(path, resolved.identity))
        for source in filter(lambda file: file.is_dataset, selection.files):
            source.check_unchanged()
        datasets = [open_dataset(prefix) for prefix in resolved.pairs]
        mapped = Pool(MAX_MAPPED, lambda dataset: dataset.unmap())
        self.seq_len, self.batch_size, self.names = seq_len, batch_size, resolved.domains
        self.tokens = np.array(resolved.tokens)
        file, begin, size = (selection.column(name) for name in ("file", "begin", "size"))
        shuffle, places = spec.settings.shuffle, map(slice, selection.bounds[:-1], selection.bounds[1:])
        self.streams = [
            DomainStream(
                name, datasets, file[place], begin[place], size[place], seq_len, seed, shuffle, mapped
            )
            for name, place in zip(self.names, places, strict=True)
        ]  # fmt: skip
        self.weights, self.rule = build_step_weights(spec, selection, self.tokens, batch_size * seq_len)
        adaptive = spec.settings.adaptive
        self.every_steps = 0 if adaptive is None else adaptive.every_steps
        self.delay_steps = 0 if adaptive is None else adaptive.delay_steps
        n_windows = [stream.n_windows for stream in self.streams]
        self.distributor = Distributor(
            n_windows, self.names, self.weights, batch_size, seed, spec.settings.dry
        )
        self.samples_per_epoch = sum(stream.n_windows for stream in self.streams)

    def lookup_domains(self, numbers: np.ndarray) -> np.ndarray:
        """Return the domain of samples int64 [n]: int32 [n]."""
        return self.distributor.get_units(numbers).domain

    def take_with_positions(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `take`, and the position of each token in its document, int64.

        A document that begins before the window has positions in the window: a 0
        marks the begin of a document or of the window.
        """
        positions = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        return self.take(numbers, positions), positions

    def take(self, numbers: np.ndarray, positions: np.ndarray | None = None) -> np.ndarray:
        """Return samples int64 [n]: int64 [n, seq_len + 1]. `positions` receives the tokens' positions."""
        units = self.distributor.get_units(numbers)
        windows = np.empty((len(numbers), self.seq_len + 1), dtype=np.int64)
        for k in np.unique(units.domain).tolist():
            rows = np.flatnonzero(units.domain == k)
            if not self.streams[k].n_windows:
                n_tokens = self.streams[k].n_tokens
                raise ValueError(
                    f"domain '{self.names[k]}': {n_tokens:,} tokens are less than a window "
                    f"of {self.seq_len} + 1. Lower dataset.seq_len or set its weight to 0."
                )
            # views of rows, which `copy_windows` writes in place
            places = None if positions is None else [positions[row] for row in rows]
            copies = [windows[row] for row in rows]
            self.streams[k].copy_windows(units.number[rows], copies, places)
            if self.n_ids is not None:
                check_ids(windows[rows], self.n_ids, f"domain '{self.names[k]}'")
        return windows

    def has_step(self, step: int) -> bool:
        """Return whether the mixture has all samples of a step."""
        distributor, n = self.distributor, (step + 1) * self.batch_size
        return distributor.dry == "repeat" or bool(distributor.find_position(step + 1).done.sum() >= n)

    def weights_at(self, step: int) -> list[float]:
        """Return the weight of each domain at a step."""
        weights = self.weights.weights_at(step)[0]
        return (weights / weights.sum()).tolist()

    def scored_domains(self, step: int, numbers: np.ndarray) -> np.ndarray | None:
        """Return the domains of samples that the rule observes at a step."""
        if self.rule is None or step % self.every_steps:
            return None
        return self.lookup_domains(numbers)

    def domain_usage(self, n_samples: int, step: int) -> tuple[Sequence[int], Sequence[float]]:
        """See SampleSource. `n_samples`: whole steps; `step`: of known weights."""
        position = self.distributor.find_position(n_samples // self.batch_size)
        return position.done.tolist(), self.weights_at(step)

    def observe(self, step: int, nats: np.ndarray, tokens: np.ndarray) -> None:
        """Report the loss on each domain in a step (float64 [K], over `tokens` [K]).

        Only every every_steps-th step counts; its weights begin delay_steps later.
        """
        assert self.rule is not None, "adaptive"
        weights = self.rule.observe((step + 1) * self.batch_size, nats, tokens)
        begin, known_to = self.weights.known_to, step + self.every_steps + self.delay_steps
        assert begin is not None, "the log of a rule has an end"
        self.weights.append(begin, weights, known_to)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state at a step, ready for JSON, from which `restore` resumes."""
        state: dict[str, Any] = {"position": self.distributor.find_position(step).as_dict()}
        if self.rule is not None:
            state |= {"log": self.weights.as_dict(step), "rule": self.rule.as_dict()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state of `state`.

        Raises ValueError for the state of another mixture.
        """
        if self.rule is not None:
            self.weights.restore(state["log"])
            self.rule.restore(state["rule"])
        self.distributor.restore(Position.from_dict(state["position"]))


class TitanLoader:
    """Batches of a prepared mixture for torchtitan 0.3.0, of one data-parallel rank.

    Tensor, pipeline and context ranks of a group get the same ones. Positions count
    from 0 in each document and window; torchtitan derives document masks from them.

    With B samples per rank and n ranks, batch t is samples t B n ... of the mixture;
    rank r gets the r-th B of them. The state is the number of samples that all ranks
    have consumed, and the state of weights that follow the model.
    """

    def __init__(
        self, mixture: str | Path, seq_len: int, local_batch_size: int, dp_rank: int, dp_world_size: int,
        global_batch_size: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """Open a mixture that scaling mixture has prepared.

        global_batch_size   samples of a step, if a step accumulates several
                            batches; the same on every layout

        Raises ValueError if the sizes do not divide.
        """
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank: got {dp_rank}, expected 0 to {dp_world_size - 1}.")
        batch_of_ranks = local_batch_size * dp_world_size
        global_size = batch_of_ranks if global_batch_size is None else global_batch_size
        if global_size < 1 or global_size % batch_of_ranks:
            raise ValueError(
                f"global_batch_size: got {global_size}, expected a multiple of {local_batch_size} x "
                f"{dp_world_size}. Lower local_batch_size."
            )
        self.samples = MixtureSamples(mixture, seq_len, global_size, seed)
        self.dp_rank, self.dp_world_size, self.batch_size = dp_rank, dp_world_size, local_batch_size
        self.next_sample = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yield batches without end, or until the mixture cannot fill a step."""
        import torch

        samples, at_once = self.samples, self.batch_size * self.dp_world_size
        while True:
            # only before a step: every rank yields all its batches, or none
            step, rest = divmod(self.next_sample, samples.batch_size)
            if not rest and not samples.has_step(step):
                return
            # Rank r reads the r-th contiguous part of the samples of all ranks.
            # B = 2, 3 ranks: the first batch is samples 0 to 5, of which rank 1
            # reads 2 and 3.
            first = self.next_sample + self.dp_rank * self.batch_size
            arrays = samples.take_with_positions(np.arange(first, first + self.batch_size))
            windows, positions = map(torch.from_numpy, arrays)
            self.next_sample += at_once
            # [B, S + 1] to inputs [B, S]
            # and labels [B, S], shifted by one token
            inputs = {"input": windows[:, :-1].contiguous(), "positions": positions[:, :-1].contiguous()}
            yield inputs, windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one string, equal on all ranks, which DCP saves once."""
        samples = self.samples
        state = {"next_sample": self.next_sample, "identity": samples.identity}
        state |= {"batch_size": samples.batch_size, "seq_len": samples.seq_len}
        state["samples"] = samples.state(self.next_sample // samples.batch_size)
        return {STATE_KEY: json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state of any number of ranks; an empty one starts from the beginning.

        Raises ValueError for another batch size or sequence length.
        """
        if not state_dict:
            return
        state = json.loads(state_dict[STATE_KEY])
        for name in ("batch_size", "seq_len"):
            if state[name] != getattr(self.samples, name):
                got = getattr(self.samples, name)
                raise ValueError(
                    f"{name}: got {got}, expected the saved {state[name]}. "
                    "Use the saved value (batch_size: samples of a step on all ranks)."
                )
        if state["identity"] != self.samples.identity:
            raise ValueError("the documents of the mixture have changed. Start a new run.")
        self.samples.restore(state["samples"])
        self.next_sample = state["next_sample"]


@cache
def _make_loader_class() -> type:
    """Return `TitanLoader` as a dataloader class of torchtitan, whose import takes seconds."""
    from torchtitan.components.dataloader import BaseDataLoader

    class MixtureLoader(TitanLoader, BaseDataLoader):  # type: ignore[misc]  # torchtitan has no types
        """Built by `Config.build`, as the trainer does."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):  # type: ignore[misc]  # as above
            """`dataset_path`: the mixture, prepared by scaling mixture."""

            dataset: str = "mixture"
            global_batch_size: int | None = None
            """Samples of a step on all ranks, if a step accumulates several batches."""
            seed: int = 0
            """Seed of the order of documents within domains."""

        def __init__(
            self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int,
            **_: Any,
        ) -> None:  # fmt: skip
            """Ignore torchtitan's other arguments (its tokenizer): the mixture is tokenized."""
            if config.dataset_path is None:
                raise ValueError("dataloader.dataset_path: got None, expected a mixture (YAML). Set it.")
            super().__init__(
                config.dataset_path, seq_len, local_batch_size, dp_rank, dp_world_size,
                config.global_batch_size, config.seed,
            )  # fmt: skip

    return MixtureLoader


def titan_config(mixture: str | Path, global_batch_size: int | None = None, seed: int = 0) -> Any:
    """Return a `BaseDataLoader.Config` of torchtitan: `config.dataloader = titan_config("slim.yaml")`.

    global_batch_size   torchtitan's `training.global_batch_size` if it
                        accumulates gradients: the number of windows of a step
                        on all ranks

    Raises ImportError without torchtitan.
    """
    return _make_loader_class().Config(  # type: ignore[attr-defined]  # made at run time
        dataset_path=str(mixture), global_batch_size=global_batch_size, seed=seed
    )
