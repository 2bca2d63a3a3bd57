"""Reader of the mixture log of a run that another process writes: the same chunks from several servers.

One process owns the weights of a run: it has locked the log, receives the losses and computes. The others
read the weights from the log, as soon as they are in it, and refuse losses.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import read_json
from megatron.mixture.adaptive import WeightLog
from megatron.mixture.chunk import Position
from megatron.mixture.distributor import Distributor
from megatron.mixture.journal import (
    RULE_SUFFIX,
    find_saved_start,
    parse_lines,
    restore_saved_weights,
)

POLL_S = 0.05


class JournalFollower:
    """Adds the weights of a log to those of a distributor, with the interface of `Learner`."""

    def __init__(self, path: Path, head: dict[str, Any], distributor: Distributor) -> None:
        """Read the log as far as it is written; it may be missing yet.

        head   as the owner of the log has written it, see `Learner`

        Raises ValueError for the log of other documents or settings.
        """
        assert isinstance(distributor.weights, WeightLog), "weights that follow a model are in a log"
        self.path, self.weights = path, distributor.weights
        self._head, self._n_bytes, self._has_head = json.loads(json.dumps(head)), 0, False
        start = find_saved_start(path)
        saved = read_json(path.with_name(path.name + RULE_SUFFIX)) if start else None
        # the owner may have saved a later state meanwhile
        if saved is not None and saved["log_begin"] == start:
            with path.open("rb") as file:
                self._check_head(parse_lines(path, file.readline())[0])
                file.seek(start)
                self._n_bytes = start + len(file.readline())  # the state includes this line
            restore_saved_weights(path, start, self.weights, saved)
            # chunks behind the saved position are scheduled from it, not from chunk 0
            distributor.restore(Position.from_dict(saved["position"]))
        self._read_lines()

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Raise ValueError: the losses belong to the process that owns the log."""
        raise ValueError(
            f"{self.path}: this process follows the log, and another one computes the weights. "
            "Report losses to the server without --follow."
        )

    def settle(self, wait_s: float) -> bool:
        """Read new weights; wait up to `wait_s` for some. Returns False if there are none."""
        until = time.monotonic() + wait_s
        while not self._read_lines():
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _read_lines(self) -> bool:
        """Add the complete lines since the last call. Returns whether weights were among them."""
        if not self.path.is_file() or self.path.stat().st_size <= self._n_bytes:
            return False
        with self.path.open("rb") as file:
            file.seek(self._n_bytes)
            content = file.read()
        # the owner may be writing a line: it counts when its newline is there
        whole = content[: content.rfind(b"\n") + 1]
        self._n_bytes += len(whole)
        has_weights = False
        for line in parse_lines(self.path, whole):
            if not self._has_head:
                self._check_head(line)
            elif "weights" in line:
                self.weights.append(line["begin"], np.array(line["weights"]), line["known_to"])
                has_weights = True
        return has_weights

    def _check_head(self, line: dict[str, Any]) -> None:
        if line != self._head:
            raise ValueError(f"{self.path}: is the log of other documents or settings. Use another run name.")
        self._has_head = True
