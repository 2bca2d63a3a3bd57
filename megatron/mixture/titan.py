"""Dataloader of a prepared mixture for torchtitan (0.3.0).

torchtitan's trainer builds it from a `BaseDataLoader.Config` (`titan_config`), iterates over
({"input": [B, S], "positions": [B, S]}, labels [B, S]), and saves it as torch's `Stateful`. torchtitan's
loader refuses another data-parallel size on resume; this one resumes on any. Only `titan_config` imports
torchtitan.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.mixture.source import MixtureSamples

STATE_KEY = "mixture"  # the only key of the state, equal on every rank for any number of ranks


class TitanLoader:
    """Batches of one data-parallel rank. Tensor, pipeline and context ranks of a group get the same ones.

    Positions count from 0 in each document, and in each window. torchtitan derives its document masks from
    them, so that no token attends to another document.

    With B samples per rank and n ranks, global batch t consists of samples t B n ... of the mixture; rank r
    gets the r-th B of them. The state contains the number of samples that all ranks have consumed, and the
    state of weights that follow the model.
    """

    def __init__(
        self, mixture: str | Path, seq_len: int, local_batch_size: int, dp_rank: int, dp_world_size: int,
        global_batch_size: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """Open a mixture that tools/prepare_mixture.py has prepared.

        global_batch_size   samples of a step, if a step accumulates several batches; the same on every layout

        Raises ValueError if the sizes do not divide.
        """
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank: got {dp_rank} of {dp_world_size}, expected 0 to {dp_world_size - 1}.")
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

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches without end, or until the mixture stops before a step that it cannot fill."""
        samples, at_once = self.samples, self.batch_size * self.dp_world_size
        while True:
            # Only before a step: its batches are either all yielded, on every rank, or none of them.
            if self.next_sample % samples.batch_size == 0:
                step = self.next_sample // samples.batch_size
                n_samples = self.next_sample + samples.batch_size
                if (
                    samples.distributor.dry != "repeat"
                    and samples.distributor.count_units_before(step + 1) < n_samples
                ):
                    return
            # Rank r reads the r-th contiguous part of the samples of all ranks.
            # B = 2, 3 ranks: the first batch is samples 0 to 5, of which rank 1 reads 2 and 3.
            first = self.next_sample + self.dp_rank * self.batch_size
            arrays = samples.take_with_positions(np.arange(first, first + self.batch_size))
            windows, positions = map(torch.from_numpy, arrays)
            self.next_sample += at_once
            # [B, S + 1] to inputs [B, S] and labels [B, S], shifted by one token
            inputs = {"input": windows[:, :-1].contiguous(), "positions": positions[:, :-1].contiguous()}
            yield inputs, windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one string, equal on all ranks, so that DCP saves it once for any layout."""
        samples = self.samples
        state = {
            "next_sample": self.next_sample,
            "batch_size": samples.batch_size,
            "seq_len": samples.seq_len,
            "identity": samples.identity,
            "samples": samples.state(self.next_sample // samples.batch_size),
        }
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
                raise ValueError(
                    f"{name}: got {getattr(self.samples, name)}, expected the saved {state[name]}. "
                    "Use the saved value (batch_size: samples of a step on all ranks)."
                )
        # states of older versions have no identity
        if state.get("identity", self.samples.identity) != self.samples.identity:
            raise ValueError(
                "the documents of the mixture have changed. Start a new run, or restore the documents."
            )
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
            """`dataset_path`: the mixture, prepared by tools/prepare_mixture.py."""

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

    global_batch_size   torchtitan's `training.global_batch_size` if it accumulates gradients: the number of
                        windows of a step on all ranks

    Raises ImportError without torchtitan.
    """
    return _make_loader_class().Config(  # type: ignore[attr-defined]  # made at run time
        dataset_path=str(mixture), global_batch_size=global_batch_size, seed=seed
    )
