"""The mixture log of one run on disk: what the model lost on chunks, and the weights found from it.

A line of JSON each, synced before anybody hears of it: a report before its sender is told so, weights before
a chunk follows them. Which chunks are reported and from which chunk new weights hold are numbers that follow
from `every_steps` and `delay_steps` alone, so that the order of documents is a function of (documents, log,
seed, chunk) whenever the reports come, and whatever is killed in between.
"""

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import LockedError, lock_descriptor
from megatron.log import get_logger
from megatron.mixture.adaptive import Adaptive, Log
from megatron.mixture.chunk import Position, parts_of
from megatron.mixture.distributor import Distributor
from megatron.run_dir import read_json, write_json

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
RULE_EVERY = 100  # observations between two copies of the rule's state: so many are observed again at most
RULE = ".rule.json"
DISK_WAIT_S = 1.0  # between two attempts to write while the disk is full

log = get_logger(__name__)


class Journal:
    """The lines of a mixture log, for one process at a time. The first line says what it is the log of."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """ValueError where another process has it, or where it is the log of something else than `head`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b", buffering=0)  # what could not be written is in no buffer either
        try:
            self._owner = lock_descriptor(self._file.fileno(), path)
        except LockedError as error:
            self._file.close()
            raise ValueError(
                f"{path}: {error.holder} keeps this log; ask it (tools/mixture_server.py), "
                "or name another run"
            ) from error
        self._lock, self._n_bytes = threading.Lock(), 0
        try:
            self.lines = list(self._read())
            if not self.lines:
                path.with_name(path.name + RULE).unlink(missing_ok=True)  # of a log that somebody removed
                self.add(head)
            elif self.lines[0] != json.loads(json.dumps(head)):
                raise ValueError(f"{path}: is the log of other documents or settings; name another run")
        except BaseException:
            self.close()
            raise

    def add(self, line: dict[str, Any]) -> None:
        """One line more, on disk when this returns. OSError (a full disk) leaves the log as it was before,
        and the next call tries again."""
        content = json.dumps(line).encode() + b"\n"
        with self._lock:
            try:
                if os.fstat(self._file.fileno()).st_size != self._n_bytes:
                    self._file.truncate(self._n_bytes)  # a part of a line that could not be taken back then
                written = 0
                while written < len(content):
                    written += self._file.write(content[written:]) or 0
                os.fsync(self._file.fileno())
            except OSError as error:
                with suppress(OSError):
                    self._file.truncate(self._n_bytes)
                raise OSError(error.errno, os.strerror(error.errno or 0), str(self.path)) from error
            self._n_bytes += len(content)

    def close(self) -> None:
        """Let another process have it."""
        with self._lock:
            if self._owner is not None:
                self._owner.release()
            self._file.close()

    def _read(self) -> Iterator[dict[str, Any]]:
        """The whole lines; one that was cut short by the end of its writer is forgotten: nobody was told."""
        self._file.seek(0)
        content = self._file.readall()
        whole = self._n_bytes = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path}:{number}: is no JSON; bring back a copy of the log") from error


class Learner:
    """Finds the weights of a run from what it reports, in a thread of its own.

    Chunks 0, every, 2 every, ... are reported, each by the group that had it: the log does not depend on how
    many groups there are. Weights found from chunk c hold from chunk c + delay on, and are known as far as
    c + every + delay.
    """

    def __init__(
        self,
        path: Path,
        head: dict[str, Any],
        rule: Adaptive,
        distributor: Distributor,
        every: int,
        delay: int,
    ) -> None:
        """The distributor's weights are a `Log`. Raises what `Journal` raises."""
        assert isinstance(distributor.weights, Log), "weights that follow a model are in a log"
        self.rule, self.weights, self.distributor = rule, distributor.weights, distributor
        self.every, self.delay = every, delay
        self.journal = Journal(path, {**head, "every": every, "delay": delay})
        self._changed = threading.Condition()
        self._reports: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._next, self._open, self._failed = 0, True, ""
        self._recall()
        self._thread = threading.Thread(target=self._learn, name="mixture-learner", daemon=True)
        self._thread.start()

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Take what the model lost on a chunk (float64 [K] each), on disk when this returns; the first report
        counts. False where that is known already, or no weights follow from that chunk.

        ValueError where they are not the losses of one chunk, or the thread has failed.
        """
        check_losses(nats, tokens, len(self.distributor.n_units))
        with self._changed:
            if chunk % self.every or chunk < self._next:
                return False
            if self._failed:
                raise ValueError(f"{self.journal.path}: {self._failed}")
            known_to = self.weights.known_to
            assert known_to is not None, "a log that grows knows how far it goes"
            if chunk >= known_to:
                raise ValueError(
                    f"chunk {chunk} is reported, and nobody can have read it; report what was read"
                )
            if chunk in self._reports:
                return False
            self.journal.add({"chunk": chunk, "nats": nats.tolist(), "tokens": tokens.tolist()})
            self._reports[chunk] = nats, tokens
            self._changed.notify_all()
        return True

    def settle(self, wait_s: float) -> bool:
        """Wait until all that was reported in order is in the weights; False where that takes longer."""
        with self._changed:
            idle = self._changed.wait_for(lambda: self._next not in self._reports or self._failed, wait_s)
            if self._failed:
                raise ValueError(f"{self.journal.path}: {self._failed}")
            return bool(idle)

    def close(self) -> None:
        """End the thread, let go of the log. What was reported is learnt from when it is opened again."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join()
        self.journal.close()

    def _recall(self) -> None:
        """The log's entries as they were found; the rule from its last copy and what came after that."""
        lines = self.journal.lines[1:]
        for line in lines:
            if "nats" in line:
                self._reports[line["chunk"]] = np.array(line["nats"]), np.array(line["tokens"])
        saved = read_json(self.journal.path.with_name(self.journal.path.name + RULE))
        if saved is not None:
            self.rule.restore(saved["rule"])
            self.distributor.restore(Position.from_dict(saved["position"]))
        for line in lines:
            if "weights" in line:
                self.weights.append(line["begin"], np.array(line["weights"]), line["known_to"])
                if saved is None or line["chunk"] >= saved["next"]:
                    self._observe(line["chunk"])
                self._reports.pop(line["chunk"])
                self._next = line["chunk"] + self.every
        self.journal.lines = []

    def _observe(self, chunk: int) -> np.ndarray:
        """What the rule makes of a chunk: mean losses a token, and shares in what the weights count."""
        nats, tokens = self._reports[chunk]
        domains = self.distributor.chunks(chunk, 1).domain
        counts = np.where(tokens > 0, np.bincount(domains, minlength=len(nats)), 0.0)
        means = np.divide(nats, tokens, out=np.zeros_like(nats), where=tokens > 0)
        return self.rule.observe((chunk + 1) * self.distributor.chunk_size, means * counts, counts)

    def _learn(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next in self._reports or not self._open)
                if not self._open:
                    return
            try:
                self._step(self._next)
            except Exception as error:  # a rule may be anybody's; those who ask are told
                log.error("%s: no weights from chunk %d: %s", self.journal.path, self._next, error)
                with self._changed:
                    self._failed = f"no weights could be found from chunk {self._next} ({error})"
                    self._changed.notify_all()
                return

    def _step(self, chunk: int) -> None:
        found = self._observe(chunk)
        parts_of(found)  # refuses what is no weights
        begin, known_to = self.weights.known_to, chunk + self.every + self.delay
        assert begin is not None, "a log that grows knows how far it goes"
        line = {"chunk": chunk, "begin": begin, "weights": found.tolist(), "known_to": known_to}
        if not self._write(line):
            return
        with self._changed:
            self.weights.append(begin, found, known_to)
            self._reports.pop(chunk)
            self._next = chunk + self.every
            self._changed.notify_all()
        if self._next // self.every % RULE_EVERY == 0:
            try:
                self._keep_rule()
            except (
                OSError
            ) as error:  # the log alone is enough: more of it is observed again when it is opened
                log.warning("%s: the state of the rule was not saved (%s)", self.journal.path, error)

    def _write(self, line: dict[str, Any]) -> bool:
        """Add a line, trying again while the disk is full; False where the learner is closed meanwhile.

        The report that the line follows from is on disk already: closed, it is learnt from anew.
        """
        is_logged = False
        while True:
            try:
                self.journal.add(line)
                return True
            except OSError as error:
                if not is_logged:
                    log.error("%s: cannot be written (%s); trying again until there is space",
                              self.journal.path, error.strerror)  # fmt: skip
                    is_logged = True
            with self._changed:
                if self._changed.wait_for(lambda: not self._open, DISK_WAIT_S):
                    return False

    def _keep_rule(self) -> None:
        place = self.journal.path.with_name(self.journal.path.name + RULE)
        position = self.distributor.position(self._next).as_dict()
        write_json(place, {"next": self._next, "rule": self.rule.as_dict(), "position": position})


def check_losses(nats: np.ndarray, tokens: np.ndarray, n_domains: int) -> None:
    """ValueError unless they are float64 [K], finite, above 0 where there are tokens, and there are some."""
    if nats.shape != (n_domains,) or tokens.shape != (n_domains,):
        raise ValueError(f"losses: {nats.shape} and {tokens.shape}, wanted a number for each of {n_domains}")
    if not (np.isfinite(nats).all() and np.isfinite(tokens).all() and (tokens >= 0).all() and tokens.any()):
        raise ValueError("losses: nats and tokens are finite numbers, and some tokens above 0")
    if (nats[tokens > 0] <= 0).any() or nats[tokens == 0].any():
        raise ValueError("losses: nats are above 0 where there are tokens, and 0 where there are none")
