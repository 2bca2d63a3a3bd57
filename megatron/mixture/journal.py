"""Mixture log of one run on disk: the loss of the model on chunks, and the weights computed from it.

The log has one line of JSON for each entry, synced before it takes effect: a report before its sender gets
the reply, weights before any chunk uses them. Which chunks are reported, and from which chunk new weights
hold, depends on `every_steps` and `delay_steps` only. The order of documents is therefore a function of
(documents, log, seed, chunk), whenever the reports arrive, and whatever is killed in between.
"""

import json
import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import LockedError, fsync_path, open_locked, read_json, write_json
from megatron.log import get_logger
from megatron.mixture.adaptive import WeightLog, WeightRule
from megatron.mixture.chunk import Position, quantize_weights
from megatron.mixture.distributor import Distributor

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
RULE_SAVE_INTERVAL = 100  # observations between two saved states of the rule; at most so many are repeated
RULE_SUFFIX = ".rule.json"
DISK_WAIT_S = 1.0  # between two attempts while the disk is full

log = get_logger(__name__)


class Journal:
    """Lines of a mixture log, for one process at a time. The first line identifies the run."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Open or create a log.

        Raises ValueError if another process has locked it, or if its first line differs from `head`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        try:
            # before the first read, so that no other process can add a line after it
            self._file_lock = open_locked(path)
        except LockedError as error:
            raise ValueError(
                f"{path}: {error.holder} has locked this log. Follow it (--follow), read from "
                "its server, or use another run name."
            ) from error
        # Unbuffered: bytes of a failed write must not be written later.
        # Append mode: every write is at the end of the file, wherever `_read_lines` has moved the position.
        self._file = path.open("a+b", buffering=0)
        self._lock, self._n_bytes = threading.Lock(), 0
        try:
            # lines before the saved state of the rule are not read: the time to open stays the same
            self.start = find_saved_start(path)
            self.lines = self._read_lines(self.start)
            if not self.lines:
                # Left over from a log that was deleted.
                # Removed before the first line is written: if the process ends in between, the log is still
                # empty, and the next open repeats this. A new log must not be combined with an old rule.
                path.with_name(path.name + RULE_SUFFIX).unlink(missing_ok=True)
                self.add(head)
                fsync_path(path.parent)  # of a new log, whose name must survive a crash as well
            # through JSON, which makes lists of tuples as in the stored line
            elif self.lines[0] != json.loads(json.dumps(head)):
                raise ValueError(f"{path}: is the log of other documents or settings. Use another run name.")
        except BaseException:
            self.close()
            raise

    def add(self, line: dict[str, Any]) -> int:
        """Append a line, and return the byte where it begins. It is on disk when this returns.

        An OSError (a full disk) leaves the log as it was before, and the caller may try again.
        """
        content = json.dumps(line).encode() + b"\n"
        with self._lock:
            try:
                if os.fstat(self._file.fileno()).st_size != self._n_bytes:
                    # partial line of an earlier write, if it could not be truncated then
                    self._file.truncate(self._n_bytes)
                written = 0
                while written < len(content):
                    # an unbuffered write may write only the first bytes of its argument
                    written += self._file.write(content[written:]) or 0
                # an entry must survive a crash of the machine before anything depends on it
                os.fsync(self._file.fileno())
            except OSError as error:
                with suppress(OSError):
                    self._file.truncate(self._n_bytes)
                raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
            # last: up to here the line counts as absent, and the next `add` truncates the file before it
            self._n_bytes += len(content)
            return self._n_bytes - len(content)

    def close(self) -> None:
        """Release the lock and close the file."""
        with self._lock:
            self._file.close()
            self._file_lock.close()

    def _read_lines(self, start: int) -> list[dict[str, Any]]:
        """Return the first line, and the complete lines from byte `start` on.

        A last line that was cut short when its writer ended is removed: no process has acted on it.
        """
        self._file.seek(0)
        head = self._file.readline() if start else b""
        self._file.seek(start)
        content = self._file.readall()
        # json.dumps escapes newlines inside strings, so that each newline byte ends a line
        whole = content.rfind(b"\n") + 1
        self._n_bytes = start + whole
        if whole < len(content):
            self._file.truncate(self._n_bytes)
        return parse_lines(self.path, head + content[:whole])


def parse_lines(path: Path, content: bytes) -> list[dict[str, Any]]:
    """Return the lines of a log. Raises ValueError for a line that is not JSON."""
    lines = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: is not JSON. Restore a copy of the log.") from error
    return lines


def find_saved_start(path: Path) -> int:
    """Return the byte of a log from which its lines follow the saved state of the rule; 0: the beginning.

    The line that begins there must be that of the weights which the state includes. It is not in a log that
    was replaced, nor in one of an earlier version, whose states have no such byte.
    """
    saved = read_json(path.with_name(path.name + RULE_SUFFIX)) if path.is_file() else None
    start = 0 if saved is None else saved.get("log_begin", 0)
    if not start or path.stat().st_size <= start:
        return 0
    with path.open("rb") as file:
        file.seek(start - 1)
        before, line = file.read(1), file.readline()
    try:
        is_last = before == b"\n" and json.loads(line).get("chunk") == saved["last_chunk"]  # type: ignore[index]
    except (ValueError, AttributeError):
        return 0
    return start if is_last else 0


def read_earlier_weights(path: Path, end: int) -> list[tuple[int, np.ndarray]]:
    """Return (first chunk, weights) of the lines of a log before byte `end`."""
    with path.open("rb") as file:
        lines = parse_lines(path, file.read(end))
    return [(line["begin"], np.array(line["weights"])) for line in lines if "weights" in line]


def restore_saved_weights(path: Path, start: int, weights: WeightLog, saved: dict[str, Any]) -> None:
    """Restore the weights of a saved state. Those of earlier chunks are read when they are requested."""
    first = weights.entries[0]
    weights.restore(saved["weights"])
    weights.load_earlier = lambda: [first, *read_earlier_weights(path, start)]


class Learner:
    """Computes the weights of a run from its reported losses, in a background thread.

    Chunks 0, every, 2 every, ... are reported, each by the group that read it, so that the log does not
    depend on the number of groups. Weights computed from chunk c hold from chunk c + delay on, and are known
    up to c + every + delay.
    """

    def __init__(
        self,
        path: Path,
        head: dict[str, Any],
        rule: WeightRule,
        distributor: Distributor,
        every: int,
        delay: int,
    ) -> None:
        """Start the learner. The distributor's weights are a `WeightLog`. Raises what `Journal` raises."""
        assert isinstance(distributor.weights, WeightLog), "weights that follow a model are in a log"
        self.rule, self.weights, self.distributor = rule, distributor.weights, distributor
        self.every, self.delay = every, delay
        self.journal = Journal(path, {**head, "every": every, "delay": delay})
        # guards the four attributes below, which callers of `report` and the thread share
        self._changed = threading.Condition()
        self._reports: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._next_chunk, self._open, self._failure = 0, True, ""
        self._replay_log()
        self._thread = threading.Thread(target=self._run_thread, name="mixture-learner", daemon=True)
        self._thread.start()

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report the loss of the model on a chunk (float64 [K] each). It is on disk when this returns.

        Only the first report of a chunk counts. Returns False if there is one already, or if no weights
        follow from that chunk. Raises ValueError for invalid losses, or if the thread has failed.
        """
        check_losses(nats, tokens, len(self.distributor.n_units))
        with self._changed:
            # reports before _next_chunk are in the log, and so are their weights
            if chunk % self.every or chunk < self._next_chunk:
                return False
            if self._failure:
                raise ValueError(f"{self.journal.path}: {self._failure}")
            known_to = self.weights.known_to
            assert known_to is not None, "the log of a rule has an end"
            # a chunk without weights has not been read by any process, so that its loss cannot exist
            if chunk >= known_to:
                raise ValueError(
                    f"chunk {chunk}: got a report before the chunk could be read. Report read chunks."
                )
            if chunk in self._reports:
                return False
            # Within the condition: of two reports of the same chunk exactly one is written. It is on disk
            # before the reply, and before the thread can compute weights from it.
            self.journal.add({"chunk": chunk, "nats": nats.tolist(), "tokens": tokens.tolist()})
            self._reports[chunk] = nats, tokens
            self._changed.notify_all()
        return True

    def settle(self, wait_s: float) -> bool:
        """Wait until the weights include all consecutive reports.

        Returns False if that takes longer than `wait_s`.
        """
        with self._changed:
            idle = self._changed.wait_for(
                lambda: self._next_chunk not in self._reports or self._failure, wait_s
            )
            if self._failure:
                raise ValueError(f"{self.journal.path}: {self._failure}")
            return bool(idle)

    def close(self) -> None:
        """Stop the thread and close the log. Reports without weights are processed at the next start."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        # before the journal is closed, because the thread may be writing a line
        self._thread.join()
        self.journal.close()

    def _replay_log(self) -> None:
        """Load the log's entries, and restore the rule from its last saved state.

        Observations behind that state are repeated.
        """
        lines = self.journal.lines[1:]
        for line in lines:
            if "nats" in line:
                self._reports[line["chunk"]] = np.array(line["nats"]), np.array(line["tokens"])
        path = self.journal.path
        saved = read_json(path.with_name(path.name + RULE_SUFFIX))
        if saved is not None:
            # the position of chunk saved["next"]: later chunks are scheduled from it, not from chunk 0
            self.rule.restore(saved["rule"])
            self.distributor.restore(Position.from_dict(saved["position"]))
        if saved is not None and self.journal.start:
            lines = lines[1:]  # the state includes the line at `start`
            restore_saved_weights(path, self.journal.start, self.weights, saved)
            self._next_chunk = saved["next"]
            for chunk, nats, tokens in saved["reports"]:
                self._reports[chunk] = np.array(nats), np.array(tokens)
        for line in lines:
            if "weights" in line:
                # The logged weights count, even if the rule computes others now: chunks were read with them.
                # The rule observes to update its state, and its result is discarded.
                self.weights.append(line["begin"], np.array(line["weights"]), line["known_to"])
                # the saved state of the rule includes all observations before `next`
                if saved is None or line["chunk"] >= saved["next"]:
                    self._observe_chunk(line["chunk"])
                self._reports.pop(line["chunk"])
                self._next_chunk = line["chunk"] + self.every
        self.journal.lines = []

    def _observe_chunk(self, chunk: int) -> np.ndarray:
        """Return the weights that the rule computes from a chunk.

        It gets the mean loss per token of each domain times the units of the domain in the chunk, and these
        units.
        """
        nats, tokens = self._reports[chunk]
        domains = self.distributor.schedule_chunks(chunk, 1).domain
        # the rule counts in units of the weights (documents), not in tokens
        counts = np.where(tokens > 0, np.bincount(domains, minlength=len(nats)), 0.0)
        means = np.divide(nats, tokens, out=np.zeros_like(nats), where=tokens > 0)
        # units up to the end of this chunk, reported or not
        return self.rule.observe((chunk + 1) * self.distributor.chunk_size, means * counts, counts)

    def _run_thread(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next_chunk in self._reports or not self._open)
                if not self._open:
                    return
            try:
                # only this thread changes _next_chunk, so that it reads it without the condition
                self._learn_chunk(self._next_chunk)
            # a custom rule may raise anything; callers get the error from `report` and `settle`
            except Exception as error:
                log.error("%s: no weights from chunk %d: %s", self.journal.path, self._next_chunk, error)
                with self._changed:
                    self._failure = f"no weights could be computed from chunk {self._next_chunk} ({error})"
                    self._changed.notify_all()
                return

    def _learn_chunk(self, chunk: int) -> None:
        # outside the condition: a fit takes seconds, in which other reports are accepted
        weights = self._observe_chunk(chunk)
        quantize_weights(weights)  # raises for invalid weights
        # Example: every = 10, delay = 8, chunk 20: the weights apply from chunk 28 on, and no others before
        # chunk 38. Chunks before `begin` may have been read already.
        begin, known_to = self.weights.known_to, chunk + self.every + self.delay
        assert begin is not None, "the log of a rule has an end"
        line = {"chunk": chunk, "begin": begin, "weights": weights.tolist(), "known_to": known_to}
        # on disk first: a chunk that follows the weights may be read as soon as they are in memory
        log_begin = self._write_line(line)
        if log_begin is None:
            return
        with self._changed:
            self.weights.append(begin, weights, known_to)
            self._reports.pop(chunk)
            self._next_chunk = chunk + self.every
            self._changed.notify_all()
        # After every 100th observation: (next // every) % 100. The line is on disk already: a state that is
        # ahead of the log would observe the chunk a second time.
        if self._next_chunk // self.every % RULE_SAVE_INTERVAL == 0:
            try:
                self._save_rule(chunk, log_begin)
            # the log is sufficient: more observations are repeated when it is opened
            except OSError as error:
                log.warning("%s: the state of the rule was not saved (%s)", self.journal.path, error)

    def _write_line(self, line: dict[str, Any]) -> int | None:
        """Append a line as `Journal.add`, and retry while the disk is full.

        Returns None if the learner is closed meanwhile.

        The report from which the line follows is on disk already, so that a closed learner repeats the
        observation when it is opened again.
        """
        is_logged = False
        while True:
            try:
                return self.journal.add(line)
            except OSError as error:
                if not is_logged:
                    log.error("%s: cannot be written (%s); retrying until there is space",
                              self.journal.path, error.strerror)  # fmt: skip
                    is_logged = True
            with self._changed:
                # instead of sleep, so that `close` ends the wait at once
                if self._changed.wait_for(lambda: not self._open, DISK_WAIT_S):
                    return None

    def _save_rule(self, last_chunk: int, log_begin: int) -> None:
        """Save the rule behind an observation, whose weights are in the line at byte `log_begin`."""
        path = self.journal.path.with_name(self.journal.path.name + RULE_SUFFIX)
        with self._changed:
            # those that arrived before their turn; some are in lines before `log_begin`
            reports = [
                [chunk, nats.tolist(), tokens.tolist()] for chunk, (nats, tokens) in self._reports.items()
            ]
        state = {
            "next": self._next_chunk, "rule": self.rule.as_dict(), "reports": reports,
            "position": self.distributor.find_position(self._next_chunk).as_dict(),
            "weights": self.weights.as_dict(self._next_chunk),
            "last_chunk": last_chunk, "log_begin": log_begin,
        }  # fmt: skip
        write_json(path, state)


def check_losses(nats: np.ndarray, tokens: np.ndarray, n_domains: int) -> None:
    """Raise ValueError unless nats and tokens are valid losses of a chunk.

    They are float64 [K] and finite, some tokens are positive, and nats are positive exactly where tokens are.
    """
    if nats.shape != (n_domains,) or tokens.shape != (n_domains,):
        raise ValueError(
            f"losses: got shapes {nats.shape} and {tokens.shape}, "
            f"expected a number for each of {n_domains} domains."
        )
    if not (np.isfinite(nats).all() and np.isfinite(tokens).all() and (tokens >= 0).all() and tokens.any()):
        raise ValueError("losses: expected finite nats and tokens, and some tokens above 0.")
    if (nats[tokens > 0] <= 0).any() or nats[tokens == 0].any():
        raise ValueError("losses: expected nats above 0 where there are tokens, and 0 where there are none.")
