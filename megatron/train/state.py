"""Progress of a run; all of it is part of the checkpoint."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Position of a run after `step` optimizer steps; next_sample samples were used over all ranks."""

    step: int = 0
    next_sample: int = 0
    tokens_seen: int = 0
    best_loss: float | None = None
    elapsed_s: float = 0.0

    def after_step(self, batch_size: int, seq_len: int, seconds: float) -> "TrainState":
        """Return the state after one more step."""
        return replace(
            self,
            step=self.step + 1,
            next_sample=self.next_sample + batch_size,
            tokens_seen=self.tokens_seen + batch_size * seq_len,
            elapsed_s=self.elapsed_s + seconds,
        )

    def after_validation(self, loss: float) -> "TrainState":
        """Return the state with the best held-out loss so far; NaN and Inf are ignored."""
        if not math.isfinite(loss):
            return self
        return replace(self, best_loss=loss if self.best_loss is None else min(loss, self.best_loss))

    def as_dict(self, samples_per_epoch: int) -> dict[str, Any]:
        """Return the content of iter_state_dict.pt: the state, and its epoch as a range of sample numbers."""
        epoch = self.next_sample // samples_per_epoch
        return {
            **asdict(self),
            "epoch": epoch,
            "segment_index": epoch,
            "segment_start": epoch * samples_per_epoch,
            "segment_end": (epoch + 1) * samples_per_epoch,
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "TrainState":
        """Restore a state from the result of `as_dict`."""
        return cls(**{name: saved[name] for name in cls.__dataclass_fields__})
