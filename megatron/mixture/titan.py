"""A prepared mixture behind torchtitan's contract for dataloaders (0.3.0).

Its trainer builds one from a `BaseDataLoader.Config` (`titan_config`), iterates over
({"input": [B, S], "positions": [B, S]}, labels [B, S]), and saves it as torch's `Stateful`. Its own loader
refuses another data-parallel size on resume; this one resumes on any. Only `titan_config` imports torchtitan.
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

STATE = "mixture"  # the one key of the state, the same on every rank and on any number of them


class TitanLoader:
    """Batches of this data-parallel rank; tensor, pipeline and context ranks of a group give the same one.

    Positions count from 0 in each document, and in each window: torchtitan makes its document masks of them,
    so that no token attends to another document.

    Global batch t is samples t B n ... of the mixture; rank r takes the r-th B of them. The state counts
    batches that were given, on all ranks, and what weights that follow the model need.
    """

    def __init__(
        self, mixture: str | Path, seq_len: int, local_batch_size: int, dp_rank: int, dp_world_size: int,
        global_batch_size: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """`mixture`: prepared by tools/prepare_mixture.py. `global_batch_size`: of a step, where it
        accumulates several batches; another layout wants the same. ValueError where sizes do not divide."""
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank {dp_rank} of {dp_world_size}: wanted 0 to {dp_world_size - 1}")
        at_once = local_batch_size * dp_world_size
        whole = at_once if global_batch_size is None else global_batch_size
        if whole < 1 or whole % at_once:
            raise ValueError(
                f"global_batch_size {whole}: is no multiple of {local_batch_size} x {dp_world_size}; "
                "lower local_batch_size"
            )
        self.samples = MixtureSamples(mixture, seq_len, whole, seed)
        self.dp_rank, self.dp_world_size, self.batch_size = dp_rank, dp_world_size, local_batch_size
        self.next_sample = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Without end, or until the mixture stops before a step that it cannot fill."""
        samples, at_once = self.samples, self.batch_size * self.dp_world_size
        while True:
            if self.next_sample % samples.batch_size == 0:
                step = self.next_sample // samples.batch_size
                n_samples = self.next_sample + samples.batch_size
                if (
                    samples.distributor.dry != "repeat"
                    and samples.distributor.n_units_before(step + 1) < n_samples
                ):
                    return
            first = self.next_sample + self.dp_rank * self.batch_size
            taken = samples.take_with_positions(np.arange(first, first + self.batch_size))
            windows, positions = map(torch.from_numpy, taken)
            self.next_sample += at_once
            inputs = {"input": windows[:, :-1].contiguous(), "positions": positions[:, :-1].contiguous()}
            yield inputs, windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """One string: the same on all ranks, so that DCP keeps one copy and reads it on any layout."""
        samples = self.samples
        told = {
            "next_sample": self.next_sample,
            "batch_size": samples.batch_size,
            "seq_len": samples.seq_len,
            "identity": samples.identity,
            "samples": samples.state(self.next_sample // samples.batch_size),
        }
        return {STATE: json.dumps(told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of any number of ranks; an empty one is a fresh start. ValueError for that of
        another batch or window."""
        if not state_dict:
            return
        told = json.loads(state_dict[STATE])
        for name in ("batch_size", "seq_len"):
            if told[name] != getattr(self.samples, name):
                raise ValueError(
                    f"{name} is {getattr(self.samples, name)}, was {told[name]} when it was saved; keep it "
                    "(global_batch_size is that of a step on all ranks)"
                )
        if told.get("identity", self.samples.identity) != self.samples.identity:
            raise ValueError("the documents of the mixture have changed; begin anew, or bring them back")
        self.samples.restore(told["samples"])
        self.next_sample = told["next_sample"]


@cache
def _titan_loader() -> type:
    """`TitanLoader` as one of torchtitan's dataloaders; its import takes seconds."""
    from torchtitan.components.dataloader import BaseDataLoader

    class MixtureLoader(TitanLoader, BaseDataLoader):
        """Built by `Config.build`, as the trainer does it."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            """`dataset_path`: the mixture, prepared by tools/prepare_mixture.py."""

            dataset: str = "mixture"
            global_batch_size: int | None = None
            """Samples of a step on all ranks, where a step accumulates several batches."""
            seed: int = 0
            """Of the order of documents within domains."""

        def __init__(
            self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int,
            **_: Any,
        ) -> None:  # fmt: skip
            """What else torchtitan passes (its tokenizer) does not apply: the mixture is tokenised."""
            if config.dataset_path is None:
                raise ValueError("dataloader.dataset_path: got None, expected a mixture (YAML). Set it.")
            super().__init__(
                config.dataset_path, seq_len, local_batch_size, dp_rank, dp_world_size,
                config.global_batch_size, config.seed,
            )  # fmt: skip

    return MixtureLoader


def titan_config(mixture: str | Path, global_batch_size: int | None = None, seed: int = 0) -> Any:
    """A `BaseDataLoader.Config` of torchtitan: `config.dataloader = titan_config("slim.yaml")`.

    ImportError without torchtitan. `global_batch_size`: torchtitan's `training.global_batch_size` where it
    accumulates gradients; the number of windows that a step takes on all ranks.
    """
    return _titan_loader().Config(  # type: ignore[attr-defined]
        dataset_path=str(mixture), global_batch_size=global_batch_size, seed=seed
    )
