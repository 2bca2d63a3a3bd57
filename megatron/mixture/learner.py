"""The log of a run: the losses that it reports, and the weights that a rule computes from them."""

import json
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import acquire_lock, read_json, write_json
from megatron.log import get_logger
from megatron.mixture.adaptive import WeightRule
from megatron.mixture.distributor import Distributor, Position, quantize_weights

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# observations between two saved states of the rule; at most so many are repeated
RULE_SAVE_INTERVAL = 100

log = get_logger(__name__)


class Learner:
    """Computes the weights of a run from its reported losses, and logs both for one process at a time.

    Chunks 0, every, 2 every, ... are reported, each by the group
    that read it, so that the log does not depend on the number
    of groups. Weights computed from chunk c hold from chunk
    c + delay on, and are known up to c + every + delay.

    The log has one line of JSON for each entry, synced before it takes effect: a
    report before its sender gets the reply, weights before any chunk uses them.
    The order of documents is therefore a function of (documents, log, seed,
    chunk), whenever the reports arrive, and whatever is killed in between.
    """

    def __init__(
        self, path: Path, head: dict[str, Any], rule: WeightRule, distributor: Distributor,
        every: int, delay: int,
    ) -> None:  # fmt: skip
        """Open or create the log, whose first line is `head`.

        Raises ValueError if another process has locked the log, or if it is the
        log of another run.
        """
        self.rule, self.weights, self.distributor = rule, distributor.weights, distributor
        self.path, self.every, self.delay = path, every, delay
        self._rule_path = path.with_name(path.name + ".rule.json")
        # guards the attributes below, for several callers of `report`
        self._lock = threading.Lock()
        self._reports: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._next_chunk = 0
        self._position = Position.start(len(distributor.n_units))
        path.parent.mkdir(parents=True, exist_ok=True)
        # before the first read, so that no other
        # process can add a line after it
        file_lock = acquire_lock(path.with_name(path.name + ".lock"))
        if file_lock is None:
            raise ValueError(
                f"{path}: another process writes this log. Read from its server, or use another run."
            )
        # append mode: every write is at the end; unbuffered: bytes of a failed
        # write are not written later
        self._file_lock, self._file = file_lock, path.open("a+b", buffering=0)
        try:
            # through JSON, which makes lists of tuples as in the stored line
            self._replay_log(json.loads(json.dumps({**head, "every": every, "delay": delay})))
            self._learn()
        except BaseException:
            self.close()
            raise

    def _read_lines(self) -> list[dict[str, Any]]:
        """Return the complete lines.

        One that was cut short when its writer ended is removed.
        """
        self._file.seek(0)
        content = self._file.readall()
        # json.dumps escapes newlines inside strings, so that each newline byte
        # ends a line
        self._file.truncate(content.rfind(b"\n") + 1)
        try:
            return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
        except ValueError as error:
            raise ValueError(f"{self.path}: got a line that is not JSON. Restore a copy of it.") from error

    def _add_line(self, line: dict[str, Any]) -> None:
        """Append a line.

        It is on disk when this returns;
        an OSError leaves the log as it was before.
        """
        size = os.fstat(self._file.fileno()).st_size
        try:
            content = json.dumps(line).encode() + b"\n"
            while content:
                # an unbuffered write may write only
                # the first bytes of its argument
                content = content[self._file.write(content) :]
            # an entry must survive a crash of the machine before anything
            # depends on it
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(size)
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report the loss of the model on a chunk (float64 [K] each).

        It is on disk when this returns, and so are the weights that follow from
        it. Only the first report of a chunk counts. Returns False if there is
        one already, or if no weights follow from that chunk. Raises ValueError
        for invalid losses, or if the rule fails.
        """
        check_losses(nats, tokens, len(self.distributor.n_units))
        with self._lock:
            # reports before _next_chunk are in the log,
            # and so are their weights
            if chunk % self.every or chunk < self._next_chunk or chunk in self._reports:
                return False
            # no process has read a chunk without weights,
            # so that its loss cannot exist
            assert self.weights.known_to is not None, "the log of a rule has an end"
            if chunk >= self.weights.known_to:
                raise ValueError(
                    f"chunk {chunk}: got a report before the chunk could be read. Report read chunks."
                )
            # on disk before the reply, and before weights are computed from it
            self._add_line({"chunk": chunk, "nats": nats.tolist(), "tokens": tokens.tolist()})
            self._reports[chunk] = nats, tokens
            self._learn()
        return True

    def close(self) -> None:
        """Release the lock and close the log."""
        with self._lock:
            self._file.close()
            self._file_lock.close()

    def _replay_log(self, head: dict[str, Any]) -> None:
        """Load the log, and restore the rule from its last saved state and the later reports."""
        lines, first = self._read_lines(), 0
        if not lines:
            self._add_line(head)
        elif lines[0] != head:
            raise ValueError(f"{self.path}: is the log of other documents or settings. Use another run name.")
        if lines and (saved := read_json(self._rule_path)) is not None:
            first, self._position = saved["next"], Position.from_dict(saved["position"])
            self.rule.restore(saved["rule"])
        for line in lines[1:]:
            if "nats" in line:
                self._reports[line["chunk"]] = np.array(line["nats"]), np.array(line["tokens"])
                continue
            # The logged weights count, even if the rule computes others now:
            # chunks were read with them. The rule observes to update its state,
            # and its result is discarded.
            self.weights.append(line["begin"], np.array(line["weights"]), line["known_to"])
            if line["chunk"] >= first:
                self._observe_chunk(line["chunk"])
            self._reports.pop(line["chunk"])
            self._next_chunk = line["chunk"] + self.every

    def _observe_chunk(self, chunk: int) -> np.ndarray:
        """Return the weights that the rule computes from a chunk.

        It gets the mean loss per token of each domain times the units of the
        domain in the chunk, and these units.
        """
        nats, tokens = self._reports[chunk]
        self._position = self.distributor.find_position(chunk, self._position)
        domains = self.distributor.schedule_chunks(chunk, 1, self._position).domain
        # the rule counts in units of the weights (documents), not in tokens
        counts = np.where(tokens > 0, np.bincount(domains, minlength=len(nats)), 0.0)
        means = np.divide(nats, tokens, out=np.zeros_like(nats), where=tokens > 0)
        # units up to the end of this chunk, reported or not
        return self.rule.observe((chunk + 1) * self.distributor.chunk_size, means * counts, counts)

    def _learn(self) -> None:
        """Compute the weights of all consecutive reports."""
        while (chunk := self._next_chunk) in self._reports:
            try:
                weights = self._observe_chunk(chunk)
                quantize_weights(weights)  # raises for invalid weights
            except Exception as error:  # a custom rule may raise anything
                raise ValueError(
                    f"{self.path}: no weights could be computed from chunk {chunk} ({error}). "
                    "Correct the rule and open the log again."
                ) from error
            # Example: every = 10, delay = 8, chunk 20: the weights apply from
            # chunk 28 on, and no others before chunk 38. Chunks before `begin`
            # may have been read already.
            begin, known_to = self.weights.known_to, chunk + self.every + self.delay
            assert begin is not None, "the log of a rule has an end"
            # on disk first: a chunk may be read
            # as soon as its weights are in memory
            line = {"chunk": chunk, "begin": begin, "weights": weights.tolist()}
            self._add_line(line | {"known_to": known_to})
            self.weights.append(begin, weights, known_to)
            self._reports.pop(chunk)
            self._next_chunk = chunk + self.every
            if self._next_chunk // self.every % RULE_SAVE_INTERVAL == 0:
                self._save_rule()

    def _save_rule(self) -> None:
        """Save the state of the rule, so that opening the log repeats few observations."""
        # the line is on disk already: a state that is ahead of it would observe
        # the chunk twice
        position = self._position.as_dict()
        state = {"next": self._next_chunk, "rule": self.rule.as_dict(), "position": position}
        try:
            write_json(self._rule_path, state)
        except OSError as error:  # the log is sufficient
            log.warning("%s: the state of the rule was not saved (%s)", self.path, error)


def check_losses(nats: np.ndarray, tokens: np.ndarray, n_domains: int) -> None:
    """Raise ValueError unless nats and tokens are valid losses of a chunk: float64 [K] each."""
    for name, array in (("nats", nats), ("tokens", tokens)):
        if array.shape != (n_domains,) or not np.isfinite(array).all() or (array < 0).any():
            raise ValueError(
                f"{name}: got {array.tolist()[:8]}, expected {n_domains} finite numbers of at least 0."
            )
    if not tokens.sum() > 0 or (nats[tokens == 0] > 0).any():
        raise ValueError("tokens: got losses without tokens, expected tokens of each domain with a loss.")
