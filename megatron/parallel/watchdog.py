"""Watchdog: tracks the progress of every rank and names the rank that hangs.

Each rank marks its current phase (`mark_phase`: sets a few attributes, no
system call). A thread of each rank sends the last mark with a beat number to
the store of the process group, over its own connection. Nothing is read from
the store during normal operation. If a collective times out, or this rank has
made no progress for most of `dist.timeout_s`, the ranks are compared:

* ended     the rank has exited with an error of its own
* silent    its beats have stopped: the process is stopped or killed, or its host is down
* behind    it beats but has made fewer marks than others: the others wait for it

The watchdog never ends a run: slow work (compilation, a long validation, a
large checkpoint) continues. A run is ended by a collective that has waited for
`dist.timeout_s`, or by NCCL's own watchdog.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from megatron.log import get_logger
from megatron.parallel.rank_env import Ranks

STORE_TIMEOUT_S = 3.0  # timeout of one store operation
WARN_AT = 0.75  # fraction of dist.timeout_s without progress after which the ranks are compared
POLL_S = 0.05  # between two looks at whether rank 0 has arrived
EXIT_DELAY_S = 20.0  # a rank whose threads still block this long after its error is terminated

log = get_logger(__name__)


@dataclass
class Progress:
    """Step and phase of a rank, and the number of its marks, which all ranks make in the same order."""

    count: int = 0
    step: int = 0
    phase: str = "starting"

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else f"before the first step ({self.phase})"


_progress = Progress()
_marked_at = 0.0
_active: "Watchdog | None" = None


def mark_phase(step: int | None, phase: str) -> None:
    """Set the current phase of this rank; step None: the step is unchanged."""
    global _progress, _marked_at
    # no lock: an assignment is atomic, and the
    # thread that sends it reads the variable once
    step = _progress.step if step is None else step
    _progress, _marked_at = Progress(_progress.count + 1, step, phase), time.monotonic()


def wait_for_rank_0() -> None:
    """Wait for rank 0 before a collective that it enters after work of its own, as long as rank 0 is alive.

    This lets rank 0 write or verify a checkpoint for longer than
    dist.timeout_s. Every rank calls it. Raises RuntimeError if rank 0 sends no
    heartbeat for dist.timeout_s.
    """
    if _active is not None:
        _active.wait_for_rank_0()


class Watchdog:
    """Sends this rank's heartbeats and compares all ranks' heartbeats. Not used in a run of one rank."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        """Start sending heartbeats to the store of the process group."""
        self.ranks, self.timeout_s = ranks, timeout_s
        # between beats: 1800 s / 16 is limited to 1 s; a timeout of 8 s gives 0.5 s
        self.interval_s = min(max(timeout_s / 16, 0.25), 1.0)
        self.n_waits, self.warned_at = 0, -1
        # a connection runs one operation at a time, so each thread has its
        # own: the one that sends, the one that compares, and the main thread
        self.sender, self.comparer, self.store = (_clone_store() for _ in range(3))
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
        # A collective alone would fail: its timeout starts when a rank
        # enters it. Here rank 0 sets a key when it arrives, and the others
        # poll the key and its beats for as long as the beats change.
        global _marked_at
        self.n_waits += 1  # all ranks call this equally often, so the count names the same wait on every rank
        key, alive, last = f"first/{self.n_waits}", time.monotonic(), b""
        while True:
            answered, beat = _call_with_timeout(STORE_TIMEOUT_S, lambda: self._poll_rank_0(key))
            if answered and beat is None:
                return  # rank 0 has arrived; or the store is down, and the collective will report why
            # a changed beat proves that rank 0
            # runs, whatever the clocks of the hosts
            if answered and beat != last:
                last, alive = beat, time.monotonic()
            if time.monotonic() - alive > self.timeout_s:
                raise RuntimeError("Timed out waiting for rank 0 to finish work of its own")
            _marked_at = time.monotonic()  # rank 0 is alive: waiting for it is not a stall
            time.sleep(POLL_S)

    def _poll_rank_0(self, key: str) -> bytes | None:
        """Return the last beat of rank 0; None if it has reached `key`."""
        if self.ranks.rank == 0:
            self.store.set(key, "1")
        if self.store.check([key]):
            return None
        return bytes(self.store.get("beat/0")) if self.store.check(["beat/0"]) else b""

    def explain_failure(self, is_late: bool) -> str:
        """Return one clause that names the lost rank, if it can be determined; waits for two beats.

        is_late   a collective has timed out: a silent rank hangs.
                  Otherwise its connection was closed.
        """
        # _compare_beats sleeps for 2.5 intervals; the rest
        # of the 3 and STORE_TIMEOUT_S are for the store
        limit_s = 3 * self.interval_s + STORE_TIMEOUT_S
        answered, verdict = _call_with_timeout(limit_s, lambda: self._compare_beats(self.store, is_late))
        text = "rank 0 has ended, and its record of the other ranks with it"
        if not answered:
            text = "rank 0 does not answer (or its host); it hosts the store of all ranks"
        elif verdict is not None:
            text = verdict[1]
            self.report_exit("lost another")  # otherwise the other ranks would list this one as silent
            if self.ranks.rank == 0:
                time.sleep(2.5 * self.interval_s)  # the store ends with this process, and others compare too
        return f"{text}; rank {self.ranks.rank} is in {_progress}"

    def report_exit(self, reason: str = "error") -> None:
        """Publish to the other ranks that this one ends, by default because of its own error."""
        _call_with_timeout(STORE_TIMEOUT_S, lambda: self.store.set(f"left/{self.ranks.rank}", reason))

    def _send_beats(self) -> None:
        number = 0
        while not self.stop_event.wait(self.interval_s if number else 0.0):
            number += 1
            try:
                # one value, so that the fields belong together
                self.sender.set(f"beat/{self.ranks.rank}", json.dumps([number, *astuple(_progress)]))
            except RuntimeError:  # the store ends with rank 0; the main thread reports the error
                return
            if time.monotonic() - _marked_at > WARN_AT * self.timeout_s and self.warned_at != _progress.count:
                self.warned_at = _progress.count  # an equal count means that this is still the same stall
                # in a thread of its own: this rank must
                # not look silent during the comparison
                threading.Thread(target=self._log_stall, daemon=True).start()

    def _log_stall(self) -> None:
        """Compare the ranks, and log those for which the others wait."""
        waited_s = time.monotonic() - _marked_at
        _, verdict = _call_with_timeout(self.timeout_s, lambda: self._compare_beats(self.comparer, True))
        lost, text = verdict or ([], "")
        if lost:
            log.warning("no progress for %.0f s of dist.timeout_s=%g: %s", waited_s, self.timeout_s, text)

    def _compare_beats(self, store: Store, is_late: bool) -> tuple[list[int], str]:
        """Read the beats twice, 2.5 intervals apart, and classify the ranks as in the module docstring.

        Return the ranks of the first class that has any, and a clause on them.
        """
        first = self._read_beats(store)
        time.sleep(2.5 * self.interval_s)
        beats = self._read_beats(store)
        # check before get: TCPStore.get of a missing key blocks until its timeout
        ranks = range(self.ranks.n_ranks)
        left = {rank: store.get(f"left/{rank}") for rank in ranks if store.check([f"left/{rank}"])}
        others = [rank for rank in ranks if rank not in left]
        progress = {rank: Progress(*values[1:]) for rank, values in beats.items()}
        furthest = max(progress.values(), key=lambda entry: entry.count, default=Progress())
        # a beat that does not change within 2.5
        # intervals means that the rank is silent
        silent = [rank for rank in others if first.get(rank) == beats.get(rank) and rank != self.ranks.rank]
        states = {
            "ended with an error of its own since": [rank for rank in left if left[rank] == b"error"],
            "hangs: no heartbeat since" if is_late else "sends no heartbeat since": silent,
            "is behind, in": [rank for rank in others if progress.get(rank, furthest).count < furthest.count],
        }
        for state, lost in states.items():
            if lost:
                names = ", rank ".join(map(str, lost[:8]))
                text = f"rank {names} {state} {progress.get(lost[0], Progress())}"
                return lost, text + f"; others in {furthest}" * state.startswith("is behind")
        return [], f"all ranks are alive, in {furthest}"

    def _read_beats(self, store: Store) -> dict[int, list[Any]]:
        """Return [number of the beat, count, step, phase] of each rank that has sent one."""
        present = [rank for rank in range(self.ranks.n_ranks) if store.check([f"beat/{rank}"])]
        values = store.multi_get([f"beat/{rank}" for rank in present])
        return {rank: json.loads(value) for rank, value in zip(present, values, strict=True)}


def _clone_store() -> Store:
    store: Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in its stubs
    store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
    return store


def _call_with_timeout(seconds: float, function: Callable[[], Any]) -> tuple[bool, Any]:
    """Return (True, result), or (False, None) after a timeout; the result is None if the store has ended."""
    # a call to a silent store blocks, and a blocked thread cannot be ended:
    # it is left behind as a daemon, which does not keep the process alive
    answers: list[Any] = []

    def call() -> None:
        try:
            answers.append(function())
        except RuntimeError:
            answers.append(None)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers), answers[0] if answers else None


def exit_after_delay() -> None:
    """End this process with status 1 after EXIT_DELAY_S, even if threads still block in a collective."""
    # os._exit: sys.exit would end the thread of this timer only
    timer = threading.Timer(EXIT_DELAY_S, os._exit, [1])
    timer.daemon = True
    timer.start()
