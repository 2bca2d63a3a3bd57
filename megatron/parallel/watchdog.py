"""Watchdog: tracks the progress of every rank and names the rank that hangs.

Each rank marks its current phase (`mark_phase`: sets a few attributes, no system call). A thread of each rank
sends the last mark with a beat number to the store of the process group, over its own connection. Nothing is
read from the store during normal operation. If a collective times out, or this rank has made no progress for
most of `dist.timeout_s`, the ranks are compared:

* ended     the rank has exited with an error of its own
* silent    its beats have stopped: the process is stopped or killed, or its host is down
* behind    it beats but has made fewer marks than others: the others wait for it

The watchdog never ends a run: slow work (compilation, a long validation, a large checkpoint) continues. A run
is ended by a collective that has waited for `dist.timeout_s`, or by NCCL's own watchdog.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megatron.log import get_logger
from megatron.parallel.rank_env import Ranks

STORE_TIMEOUT_S = 3.0  # timeout of one store operation
BEAT_INTERVAL_S = (0.25, 1.0)  # minimum and maximum interval between beats
WARN_AT = 0.75  # fraction of dist.timeout_s without progress after which the ranks are compared
EXIT_DELAY_S = 20.0  # a rank whose threads still block this long after its error is terminated

log = get_logger(__name__)


@dataclass
class Mark:
    """Progress of a rank: step, phase and number of marks so far.

    All ranks make the same sequence of marks.
    """

    step: int = 0
    phase: str = "starting"
    count: int = 0
    since: float = 0.0


_mark = Mark()


def mark_phase(step: int | None, phase: str) -> None:
    """Set the current phase of this rank; step None: the step is unchanged."""
    # No lock. An assignment is atomic, and the count is increased last while a beat reads it first: a beat
    # with a new count never has an old phase.
    if step is not None:
        _mark.step = step
    _mark.phase, _mark.since = phase, time.monotonic()
    _mark.count += 1


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one rank in the store."""

    number: int
    count: int
    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else f"before the first step ({self.phase})"


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
        """Start sending heartbeats. Without a reachable store the watchdog is inactive."""
        self.ranks, self.timeout_s = ranks, timeout_s
        # 1800 s / 16 is limited to 1 s; a timeout of 8 s gives 0.5 s
        self.interval_s = min(max(timeout_s / 16, BEAT_INTERVAL_S[0]), BEAT_INTERVAL_S[1])
        # a store can survive the restart of an elastic launcher: earlier beats have another prefix
        self.prefix = f"megatron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.number, self.warned_at = 0, -1
        self.n_waits = 0
        self.store: Store | None = None
        self.beat_at, self.suspended_s = time.monotonic(), 0.0
        self.resumed_at = 0.0
        self.stop_event = threading.Event()
        mark_phase(0, "starting")
        global _active
        _active = self
        self.thread = threading.Thread(target=self._send_beats, name="watchdog", daemon=True)
        self.thread.start()

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
            answered, beat = _call_with_timeout(STORE_TIMEOUT_S, lambda: self._poll_rank_0(key))
            if beat is True or answered and beat is None:
                return  # rank 0 has arrived; or the store is down, and the collective will report why
            # a changed beat number proves that rank 0 runs, whatever the clocks of the hosts
            if answered and beat != number:
                number, alive = beat, time.monotonic()
            if time.monotonic() - alive > self.timeout_s:
                raise RuntimeError("Timed out waiting for rank 0 to finish work of its own")
            _mark.since = time.monotonic()  # rank 0 is alive: waiting for it is no stall
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)  # short waits stay short, long ones cost little

    def _poll_rank_0(self, key: str) -> bool | int | None:
        """Return True if rank 0 has reached `key`, else the number of its last beat; None without a store."""
        try:
            self.store = self.store or self._connect_store()
            if self.ranks.rank == 0:
                self.store.set(key, "1")
                return True
            if self.store.check([key]):
                return True
            return int(self.store.get("beat/0").split()[0]) if self.store.check(["beat/0"]) else 0
        except Exception as error:
            log.debug("watchdog: %s", error)
            return None

    def explain_failure(self, is_late: bool) -> str:
        """Return one clause that names the lost rank, if it can be determined; waits for two beats.

        is_late   a collective has timed out: a silent rank hangs. Otherwise its connection was closed.
        """
        # In order: this process itself was suspended, the store does not answer (its host, rank 0, hangs),
        # the store is closed (rank 0 has ended), or the comparison of the beats names the rank.
        position = str(Beat(0, 0, _mark.step, _mark.phase))
        # _compare_beats sleeps for 2.5 intervals; the rest of the 3 and STORE_TIMEOUT_S are for the store
        answered, text = _call_with_timeout(
            3 * self.interval_s + STORE_TIMEOUT_S, lambda: self._describe_lost(is_late)
        )
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
            self._report_exit("lost another")
            # the others read beats for 2.5 intervals as well; the store ends with this process
            if self.ranks.rank == 0:
                time.sleep(2.5 * self.interval_s)  # keep the store alive for the others
        return f"{text}; rank {self.ranks.rank} is in {position}"

    def report_error(self) -> None:
        """Publish to the other ranks that this one ends because of its own error."""
        self._report_exit("error")

    def _report_exit(self, reason: str) -> None:
        _call_with_timeout(
            STORE_TIMEOUT_S, lambda: self._connect_store().set(f"left/{self.ranks.rank}", reason)
        )

    def _connect_store(self) -> Store:
        # a connection per use: a call that blocks on the store does not delay the heartbeats
        # a TCPStore client runs one operation at a time, so a `get` that waits would block a `set`
        host, port = self.ranks.address, self.ranks.port
        assert host is not None and port is not None, "a run of several ranks has an address"
        socket.create_connection((host, port), STORE_TIMEOUT_S).close()  # fails fast; TCPStore would retry
        store = TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
        )
        return PrefixStore(self.prefix, store)

    def _send_beats(self) -> None:
        try:
            store = self._connect_store()
            # the first beat without a delay; afterwards `wait` is both the interval and the end on close()
            while not self.stop_event.wait(self.interval_s if self.number else 0.0):
                # before the stall check: a process that was suspended must not blame the others for its gap
                self._detect_suspension()
                self.number += 1
                # one value, so that the fields belong together; the phase is last since it may contain spaces
                beat = f"{self.number} {_mark.count} {_mark.step} {_mark.phase}"
                store.set(f"beat/{self.ranks.rank}", beat)
                self._warn_of_stall()
        except Exception as error:  # the store ends with rank 0; the main thread reports the error
            log.debug("watchdog: %s", error)

    def _detect_suspension(self) -> None:
        """Detect that this process itself was suspended.

        Then it is the rank that the others report as lost.
        """
        # the clock continues while the process is stopped, for example by SIGSTOP
        now = time.monotonic()
        gap_s, self.beat_at = now - self.beat_at, now
        # a loaded host delays beats by seconds: only a gap of half the timeout can have made others give up
        if gap_s > max(4 * self.interval_s + STORE_TIMEOUT_S, 0.5 * self.timeout_s):
            self.suspended_s, self.resumed_at, self.warned_at = gap_s, now, _mark.count
            log.warning("this process was stopped for %.0f s, in step %d", gap_s, _mark.step)

    def _warn_of_stall(self) -> None:
        """Compare the ranks, once per stall, and dump this rank's stack if the others wait for it."""
        waited_s = time.monotonic() - _mark.since
        if waited_s < WARN_AT * self.timeout_s or self.warned_at == _mark.count:
            return
        # one warning per mark: an equal count means that this is still the same stall
        self.warned_at = _mark.count
        # in a thread of its own: the comparison takes 2.5 intervals, in which this rank must not look silent
        threading.Thread(target=self._log_stall, args=(waited_s,), daemon=True).start()

    def _log_stall(self, waited_s: float) -> None:
        try:
            lost = self._compare_beats(self._connect_store())
        except Exception as error:
            log.debug("watchdog: %s", error)
            return
        # only a rank behind prints its stack: others would show the collective in which they wait
        if self.ranks.rank in lost.behind:
            position = lost.beats[self.ranks.rank]
            text = "no progress for %.0f s in %s while other ranks wait; stack of this rank:"
            log.warning(text, waited_s, position)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        elif lost.silent or lost.behind:
            text = lost.describe(is_late=True)
            log.warning("no progress for %.0f s of dist.timeout_s=%g: %s", waited_s, self.timeout_s, text)

    def _describe_lost(self, is_late: bool) -> str | None:
        """Return a clause on the lost ranks; None if the store has ended.

        The first rank with a verdict stores it, and the others return that one: all ranks report the same.
        """
        try:
            store = self._connect_store()
            # comparisons at different times can differ. Two ranks may still both write a verdict: without a
            # lock, since only the text of an error depends on it.
            if store.check(["verdict"]):
                return store.get("verdict").decode()
            lost = self._compare_beats(store)
            text = lost.describe(is_late)
            if lost.ended or lost.silent or lost.behind:
                store.set("verdict", text)
            return text
        except Exception as error:  # DistStoreError, or a RuntimeError in older torch
            log.debug("watchdog: %s", error)
            return None

    def _compare_beats(self, store: Store) -> "LostRanks":
        """Read the beats twice, 2.5 intervals apart, and classify the ranks; see the module docstring."""
        # a beat number that does not change within 2.5 intervals means that the rank is silent
        first = self._read_beats(store)
        time.sleep(2.5 * self.interval_s)
        beats = self._read_beats(store)
        ranks = range(self.ranks.n_ranks)
        # check before get: TCPStore.get of a missing key blocks until its timeout
        left = {rank: store.get(f"left/{rank}") for rank in ranks if store.check([f"left/{rank}"])}
        # `first` may lack a rank that has only just started to send: it is not silent
        silent = [
            rank
            for rank in ranks
            if rank not in left
            and rank != self.ranks.rank
            and (rank not in beats or rank in first and first[rank].number == beats[rank].number)
        ]
        # all ranks make the same marks in the same order, so a smaller count means that the rank is behind
        counts = {rank: beat.count for rank, beat in beats.items() if rank not in (*silent, *left)}
        furthest = max(counts.values(), default=0)
        behind = [rank for rank, count in counts.items() if count < furthest]
        return LostRanks([rank for rank, why in left.items() if why == b"error"], silent, behind, beats)

    def _read_beats(self, store: Store) -> dict[int, Beat]:
        """Return the last beat of each rank that has sent one."""
        keys = [f"beat/{rank}" for rank in range(self.ranks.n_ranks)]
        present = [rank for rank, key in enumerate(keys) if store.check([key])]
        beats = {}
        for rank, value in zip(present, store.multi_get([keys[rank] for rank in present]), strict=True):
            number, count, step, phase = value.decode().split(" ", 3)
            beats[rank] = Beat(int(number), int(count), int(step), phase)
        return beats


@dataclass(frozen=True)
class LostRanks:
    """Result of a comparison of the beats."""

    ended: list[int]
    silent: list[int]
    behind: list[int]
    beats: dict[int, Beat]

    def describe(self, is_late: bool) -> str:
        """Return one clause on the first non-empty class: ended, silent, behind."""
        if self.ended:
            last = self._describe_last_beat(self.ended)
            return f"{_format_ranks(self.ended)} ended with an error of its own{last}"
        if self.silent:
            hangs = ("hangs: " if len(self.silent) == 1 else "hang: ") if is_late else ""
            verb = hangs or ("sends " if len(self.silent) == 1 else "send ")
            return f"{_format_ranks(self.silent)} {verb}no heartbeat{self._describe_last_beat(self.silent)}"
        furthest = max(self.beats.values(), key=lambda beat: beat.count, default=None)
        if self.behind:
            are = "is" if len(self.behind) == 1 else "are"
            position = self.beats[self.behind[0]]
            return f"{_format_ranks(self.behind)} {are} behind, in {position}; others in {furthest}"
        return f"all ranks are alive, in {furthest}" if self.beats else "no rank has reported"

    def _describe_last_beat(self, ranks: Sequence[int]) -> str:
        last = self.beats.get(ranks[0])
        return ", and it has never reported" if last is None else f" since {last}"


def _format_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def _call_with_timeout(seconds: float, function: Callable[[], Any]) -> tuple[bool, Any]:
    """Return (True, result), or (False, None) after a timeout: a call to a silent store blocks its thread."""
    # a blocked thread cannot be ended: it is left behind as a daemon, which does not keep the process alive
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers), answers[0] if answers else None


def exit_after_delay() -> None:
    """End this process with status 1 after EXIT_DELAY_S, even if threads still block in a collective."""

    def exit_process() -> None:
        # os._exit: sys.exit would end the thread of this timer only
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(EXIT_DELAY_S, exit_process)
    timer.daemon = True
    timer.start()
