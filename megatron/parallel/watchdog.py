"""Watchdog: tracks the progress of every rank and names the rank that hangs.

Each rank marks its current phase (`mark_phase`: sets a few attributes, no system call). A thread of each rank
sends the last mark with a beat number to the store of the process group, over its own connection. Nothing is
read from the store during normal operation. If a collective fails or times out, the ranks are compared:

* ended     the rank has exited with an error of its own
* silent    its beats have stopped: the process is stopped or killed, or its host is down
* behind    it beats but has made fewer marks than others: the others wait for it

The watchdog never ends a run: slow work (compilation, a long validation, a large checkpoint) continues. A run
is ended by a collective that has waited for `dist.timeout_s`, or by NCCL's own watchdog.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.log import get_logger
from megatron.parallel.rank_env import Ranks

STORE_TIMEOUT_S = 3.0  # timeout of one store operation
BEAT_INTERVAL_S = (0.25, 1.0)  # minimum and maximum interval between beats
EXIT_DELAY_S = 20.0  # a rank whose threads still block this long after its error is terminated

log = get_logger(__name__)


@dataclass
class Mark:
    """Progress of a rank: number of marks, step and phase.

    All ranks make the same sequence of marks.
    """

    count: int = 0
    step: int = 0
    phase: str = "starting"

    @classmethod
    def parse(cls, value: str) -> "Mark":
        """Parse a beat of the store: its number, then a mark."""
        _, count, step, phase = value.split(" ", 3)
        return cls(int(count), int(step), phase)

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else f"before the first step ({self.phase})"


_mark = Mark()


def mark_phase(step: int | None, phase: str) -> None:
    """Set the current phase of this rank; step None: the step is unchanged."""
    # No lock. An assignment is atomic, and the count is increased last while a beat reads it first: a beat
    # with a new count never has an old phase.
    if step is not None:
        _mark.step = step
    _mark.phase = phase
    _mark.count += 1


_active: "Watchdog | None" = None


def wait_for_rank_0() -> None:
    """Wait for rank 0 before a collective that it enters after work of its own, as long as rank 0 is alive.

    This lets rank 0 write or verify a checkpoint for longer than dist.timeout_s. Every rank calls it. Raises
    RuntimeError if rank 0 sends no heartbeat for dist.timeout_s.
    """
    if _active is not None:
        _active.wait_for_rank_0()


class Watchdog:
    """Sends the heartbeats of this rank and compares those of all ranks. Not used in a run of one rank."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        """Start sending heartbeats to the store of the default process group."""
        self.ranks, self.timeout_s = ranks, timeout_s
        # 1800 s / 16 is limited to 1 s; a timeout of 8 s gives 0.5 s
        self.interval_s = min(max(timeout_s / 16, BEAT_INTERVAL_S[0]), BEAT_INTERVAL_S[1])
        # Two connections: a client runs one operation at a time, so a blocked query would delay the beats.
        # The store has a prefix for each restart of an elastic launcher, so earlier beats are not read.
        store: Any = dist.distributed_c10d._get_default_store()  # torch's stubs lack `clone`
        self.beat_store, self.store = store.clone(), store.clone()
        for connection in (self.beat_store, self.store):
            # longer than a query waits: an operation that times out must not look like the end of the store
            connection.set_timeout(timedelta(seconds=2 * STORE_TIMEOUT_S))
        self.number = self.n_waits = 0
        self.beat_at, self.suspended_s, self.resumed_at = time.monotonic(), 0.0, 0.0
        self.stop_event = threading.Event()
        mark_phase(0, "starting")
        global _active
        _active = self
        threading.Thread(target=self._send_beats, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop the heartbeats."""
        global _active
        _active = None
        self.stop_event.set()

    def wait_for_rank_0(self) -> None:
        """Wait for rank 0; see the module-level function."""
        # A collective alone would fail: its timeout starts when a rank enters it. Here rank 0 sets a key when
        # it arrives, and the others poll the key and its beats for as long as the beats change.
        # all ranks call this equally often, so the count names the same wait on every rank
        self.n_waits += 1
        key, pause_s, alive, number = f"first/{self.n_waits}", 0.002, time.monotonic(), -1
        while True:
            answered, beat = self._query(lambda: self._poll_rank_0(key))
            if beat is True or answered and beat is None:
                return  # rank 0 has arrived; or the store is down, and the collective will report why
            # a changed beat number proves that rank 0 runs, whatever the clocks of the hosts
            if answered and beat != number:
                number, alive = beat, time.monotonic()
            if time.monotonic() - alive > self.timeout_s:
                raise RuntimeError("Timed out waiting for rank 0 to finish work of its own")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)  # short waits stay short, long ones cost little

    def _poll_rank_0(self, key: str) -> bool | int:
        """Return True if rank 0 has reached `key`, else the number of its last beat."""
        if self.ranks.rank == 0:
            self.store.set(key, "1")
            return True
        if self.store.check([key]):
            return True
        return int(self.store.get("beat/0").split()[0]) if self.store.check(["beat/0"]) else 0

    def explain_failure(self, is_late: bool) -> str:
        """Return one clause that names the lost rank, if it can be determined; waits for two beats.

        is_late   a collective has timed out: a silent rank hangs. Otherwise its connection was closed.
        """
        # In order: this process itself was suspended, the store does not answer (its host, rank 0, hangs),
        # the store is closed (rank 0 has ended), or the comparison of the beats names the rank.
        # _compare_beats sleeps for 2.5 intervals; the rest of the 3 is for the store
        answered, text = self._query(lambda: self._compare_beats(is_late), 3 * self.interval_s)
        # after SIGCONT a collective fails within seconds; an older suspension is not the cause
        if self.suspended_s and time.monotonic() - self.resumed_at < EXIT_DELAY_S:
            text = f"this process was stopped for {self.suspended_s:.0f} s and the others did not wait"
        elif not answered:
            hangs = "hangs: " if is_late else ""
            text = f"rank 0 {hangs}does not answer (or its host); it hosts the store of all ranks"
        elif text is None:
            text = "rank 0 has ended, and its record of the other ranks with it"
        else:
            # otherwise the other ranks would list this one as silent; only the reason "error" counts as ended
            self._query(lambda: self.store.set(f"left/{self.ranks.rank}", "lost another"))
            # the others read beats for 2.5 intervals as well; the store ends with this process
            if self.ranks.rank == 0:
                time.sleep(2.5 * self.interval_s)  # keep the store alive for the others
        return f"{text}; rank {self.ranks.rank} is in {_mark}"

    def report_error(self) -> None:
        """Publish to the other ranks that this one ends because of its own error."""
        self._query(lambda: self.store.set(f"left/{self.ranks.rank}", "error"))

    def _query(self, function: Callable[[], Any], more_s: float = 0.0) -> tuple[bool, Any]:
        """Call a function of the store: (True, result), or (False, None) if the store does not answer.

        The result is None if the store has ended.
        """
        answers: list[Any] = []

        def run() -> None:
            try:
                answers.append(function())
            except Exception as error:  # DistStoreError or DistNetworkError
                log.debug("watchdog: %s", error)
                answers.append(None)

        # a blocked thread cannot be ended: as a daemon, it does not keep the process alive
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(STORE_TIMEOUT_S + more_s)
        return bool(answers), answers[0] if answers else None

    def _send_beats(self) -> None:
        try:
            # the first beat without a delay; afterwards `wait` is both the interval and the end on close()
            while not self.stop_event.wait(self.interval_s if self.number else 0.0):
                self._detect_suspension()
                self.number += 1
                # one value, so that the fields belong together; the phase is last since it may contain spaces
                beat = f"{self.number} {_mark.count} {_mark.step} {_mark.phase}"
                self.beat_store.set(f"beat/{self.ranks.rank}", beat)
        except Exception as error:  # the store ends with rank 0; the main thread reports the error
            log.debug("watchdog: %s", error)

    def _detect_suspension(self) -> None:
        """Detect that this process itself was suspended: then the others report it as lost."""
        # the clock continues while the process is stopped, for example by SIGSTOP
        now = time.monotonic()
        gap_s, self.beat_at = now - self.beat_at, now
        # a loaded host delays beats by seconds: only a gap of half the timeout can have made others give up
        if gap_s > max(4 * self.interval_s + STORE_TIMEOUT_S, 0.5 * self.timeout_s):
            self.suspended_s, self.resumed_at = gap_s, now
            log.warning("this process was stopped for %.0f s, in step %d", gap_s, _mark.step)

    def _compare_beats(self, is_late: bool) -> str:
        """Return a clause on the lost ranks.

        Beats are read twice, 2.5 intervals apart; see the module docstring.
        """
        # a beat number that does not change within 2.5 intervals means that the rank is silent
        first = self._read_values("beat")
        time.sleep(2.5 * self.interval_s)
        values, left = self._read_values("beat"), self._read_values("left")
        beats = {rank: Mark.parse(value) for rank, value in values.items()}
        # `first` may lack a rank that has only just started to send: it is not silent
        others = [rank for rank in range(self.ranks.n_ranks) if rank not in (*left, self.ranks.rank)]
        # a value that has not changed has the number of the same beat
        silent = [rank for rank in others if rank not in values or first.get(rank) == values[rank]]
        ended = [rank for rank, reason in left.items() if reason == "error"]
        silence = "hangs: no heartbeat" if is_late else "sends no heartbeat"
        for ranks, state in ((ended, "ended with an error of its own"), (silent, silence)):
            if ranks:
                last = f" since {beats[ranks[0]]}" if ranks[0] in beats else ", and it has never reported"
                return f"{_format_ranks(ranks)} {state}{last}"
        # all ranks make the same marks in the same order, so a smaller count means that the rank is behind
        alive = {rank: beat for rank, beat in beats.items() if rank not in left}
        furthest = max(alive.values(), key=lambda beat: beat.count)
        behind = [rank for rank, beat in alive.items() if beat.count < furthest.count]
        if not behind:
            return f"all ranks are alive, in {furthest}"
        return f"{_format_ranks(behind)} is behind, in {beats[behind[0]]}; others in {furthest}"

    def _read_values(self, kind: str) -> dict[int, str]:
        """Return the values that ranks have set under a kind of key."""
        # check before get: TCPStore.get of a missing key blocks until its timeout
        keys = {rank: f"{kind}/{rank}" for rank in range(self.ranks.n_ranks)}
        present = {rank: key for rank, key in keys.items() if self.store.check([key])}
        values = self.store.multi_get([*present.values()]) if present else []
        return {rank: value.decode() for rank, value in zip(present, values, strict=True)}


def _format_ranks(ranks: list[int]) -> str:
    """Format ranks as a singular subject: the first and the number of others."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"rank {ranks[0]} (and {len(ranks) - 1} more)"


def exit_after_delay() -> None:
    """End this process with status 1 after EXIT_DELAY_S, even if threads still block in a collective."""

    # os._exit: sys.exit would end the thread of this timer only
    timer = threading.Timer(EXIT_DELAY_S, os._exit, (1,))
    timer.daemon = True
    timer.start()
