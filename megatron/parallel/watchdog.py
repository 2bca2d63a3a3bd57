"""Where every rank is, so that the one that hangs can be named.

Each rank marks what it does (`mark`: a few attributes, no call of the system). A thread of each rank sends
its last mark with a beat number to the store of the process group, over a connection of its own. Nothing is
read there as long as all goes well. Where a collective times out, or this rank has made no progress for most
of `dist.timeout_s`, the ranks are compared:

* ended     it has left with an error of its own
* silent    its beats have stopped: the process is stopped, was killed, or its host is gone
* behind    it beats, and has made fewer marks than others: they wait for it

The watchdog ends nothing: slow work (compilation, a long validation, a large checkpoint) goes on. What ends a
run is a collective that has waited for `dist.timeout_s`, or NCCL's own watchdog.
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

import torch.distributed as dist

from megatron.config.launcher import Ranks
from megatron.log import get_logger

STORE_S = 3.0  # for one answer of the store
BEAT_S = (0.25, 1.0)  # least and most between two beats
WARN_AT = 0.75  # part of dist.timeout_s without progress after which the ranks are compared
LEAVE_S = 20.0  # after its error is known, a rank that still waits for threads of its own is ended

log = get_logger(__name__)


@dataclass
class Mark:
    """What a rank does: its step, a word on it, and how many marks it has made. All ranks make the same."""

    step: int = 0
    phase: str = "starting"
    count: int = 0
    since: float = 0.0


_mark = Mark()


def mark(step: int | None, phase: str) -> None:
    """Say what this rank does from now on; None: in the same step."""
    if step is not None:
        _mark.step = step
    _mark.phase, _mark.since = phase, time.monotonic()
    _mark.count += 1


@dataclass(frozen=True)
class Beat:
    """What the store has of one rank."""

    number: int
    count: int
    step: int
    phase: str

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})" if self.step else f"before the first step ({self.phase})"


_active: "Watchdog | None" = None


def wait_for_first() -> None:
    """Before a collective that rank 0 enters after work that it does alone: wait as long as it is alive.

    So a checkpoint may take longer to write, or to verify, than dist.timeout_s. Every rank calls it. Raises
    RuntimeError where rank 0 gives no sign of life for that long.
    """
    if _active is not None:
        _active.wait_for_first()


class Watchdog:
    """The beats of this rank, and the comparison of all. A run of one rank has none."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        """Begins to beat. Without a store that answers it does nothing, and names nobody."""
        self.ranks, self.timeout_s = ranks, timeout_s
        self.interval_s = min(max(timeout_s / 16, BEAT_S[0]), BEAT_S[1])
        self.prefix = f"megatron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self.number, self.warned_at = 0, -1
        self.n_waits, self.store = 0, None
        self.beat_at, self.slept_s = time.monotonic(), 0.0
        self.woken = 0.0
        self.stopped = threading.Event()
        mark(0, "starting")
        global _active
        _active = self
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop beating."""
        global _active
        _active = None
        self.stopped.set()

    def wait_for_first(self) -> None:
        """See the function of this name."""
        self.n_waits += 1
        key, pause_s, alive, number = f"first/{self.n_waits}", 0.002, time.monotonic(), -1
        while True:
            known, beat = _within(STORE_S, lambda: self._ask_first(key))
            if beat is True or known and beat is None:
                return  # rank 0 is there; or the store is gone, and the collective finds out why
            if known and beat != number:
                number, alive = beat, time.monotonic()
            if time.monotonic() - alive > self.timeout_s:
                raise RuntimeError("Timed out waiting for rank 0 to finish work of its own")
            _mark.since = time.monotonic()  # this rank waits for one that is alive: no stall
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    def _ask_first(self, key: str) -> bool | int | None:
        """True where rank 0 has reached `key`, its last beat where it has not, None without a store."""
        try:
            self.store = self.store or self._connect()
            if self.ranks.rank == 0:
                self.store.set(key, "1")
                return True
            if self.store.check([key]):
                return True
            return int(self.store.get("beat/0").split()[0]) if self.store.check(["beat/0"]) else 0
        except Exception as error:
            log.debug("watchdog: %s", error)
            return None

    def explain(self, is_late: bool) -> str:
        """One clause on which rank is lost, as far as that is known; waits for two beats.

        is_late   a collective has timed out: a silent rank hangs. Otherwise its connection was closed.
        """
        here = str(Beat(0, 0, _mark.step, _mark.phase))
        answered, text = _within(3 * self.interval_s + STORE_S, lambda: self._compare(is_late))
        if self.slept_s and time.monotonic() - self.woken < LEAVE_S:
            text = f"this process was stopped for {self.slept_s:.0f} s and the others did not wait"
        elif not answered:
            hangs = "hangs: " if is_late else ""
            text = f"rank 0 {hangs}does not answer, or its host: it keeps the store of all ranks"
        elif text is None:
            text = "rank 0 has ended, and with it what is known of the others"
        else:
            self._leave("lost another")
            if self.ranks.rank == 0:
                time.sleep(2.5 * self.interval_s)  # the others still look into its store
        return f"{text}; rank {self.ranks.rank} is in {here}"

    def leave_with_error(self) -> None:
        """Let the other ranks know that this one ends because of an error of its own."""
        self._leave("error")

    def _leave(self, why: str) -> None:
        _within(STORE_S, lambda: self._connect().set(f"left/{self.ranks.rank}", why))

    def _connect(self) -> dist.Store:
        where = self.ranks.address, self.ranks.port
        socket.create_connection(where, STORE_S).close()  # torch tries again where nobody listens
        store = dist.TCPStore(
            *where,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_S),
        )
        return dist.PrefixStore(self.prefix, store)

    def _run(self) -> None:
        try:
            store = self._connect()
            while not self.stopped.wait(self.interval_s if self.number else 0.0):
                self._note_sleep()
                self.number += 1
                beat = f"{self.number} {_mark.count} {_mark.step} {_mark.phase}"
                store.set(f"beat/{self.ranks.rank}", beat)
                self._warn_of_stall()
        except Exception as error:  # the store ends with rank 0; what the run then says is not this thread's
            log.debug("watchdog: %s", error)

    def _note_sleep(self) -> None:
        """Where this process itself has been stopped for a while: then it is the one that the others miss."""
        now = time.monotonic()
        slept_s, self.beat_at = now - self.beat_at, now
        if slept_s > max(4 * self.interval_s + STORE_S, 0.5 * self.timeout_s):
            self.slept_s, self.woken, self.warned_at = slept_s, now, _mark.count
            log.warning("this process was stopped for %.0f s, in step %d", slept_s, _mark.step)

    def _warn_of_stall(self) -> None:
        """Once for each stall: compare the ranks, and show where this one is if the others wait for it."""
        waited_s = time.monotonic() - _mark.since
        if waited_s < WARN_AT * self.timeout_s or self.warned_at == _mark.count:
            return
        self.warned_at = _mark.count
        threading.Thread(target=self._tell_stall, args=(waited_s,), daemon=True).start()

    def _tell_stall(self, waited_s: float) -> None:
        try:
            lost = self._find_lost(self._connect())
        except Exception as error:
            log.debug("watchdog: %s", error)
            return
        if self.ranks.rank in lost.behind:
            where = lost.beats[self.ranks.rank]
            log.warning("no progress for %.0f s in %s, and others wait; this rank is at:", waited_s, where)
            faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        elif lost.silent or lost.behind:
            text = lost.sentence(is_late=True)
            log.warning("no progress for %.0f s of dist.timeout_s=%g: %s", waited_s, self.timeout_s, text)

    def _compare(self, is_late: bool) -> str | None:
        """The ranks that are lost; None where the store has ended. The first that names one spares the others
        the search."""
        try:
            store = self._connect()
            if store.check(["verdict"]):
                return store.get("verdict").decode()
            lost = self._find_lost(store)
            text = lost.sentence(is_late)
            if lost.ended or lost.silent or lost.behind:
                store.set("verdict", text)
            return text
        except Exception as error:  # DistStoreError, or a RuntimeError of older torch
            log.debug("watchdog: %s", error)
            return None

    def _find_lost(self, store: dist.Store) -> "Lost":
        """Compare two looks at the beats, two beats apart."""
        first = self._beats(store)
        time.sleep(2.5 * self.interval_s)
        beats = self._beats(store)
        ranks = range(self.ranks.n_ranks)
        left = {rank: store.get(f"left/{rank}") for rank in ranks if store.check([f"left/{rank}"])}
        silent = [
            rank
            for rank in ranks
            if rank not in left
            and rank != self.ranks.rank
            and (rank not in beats or rank in first and first[rank].number == beats[rank].number)
        ]
        counts = {rank: beat.count for rank, beat in beats.items() if rank not in (*silent, *left)}
        furthest = max(counts.values(), default=0)
        behind = [rank for rank, count in counts.items() if count < furthest]
        return Lost([rank for rank, why in left.items() if why == b"error"], silent, behind, beats)

    def _beats(self, store: dist.Store) -> dict[int, Beat]:
        """The last beat of each rank that has ever sent one."""
        keys = [f"beat/{rank}" for rank in range(self.ranks.n_ranks)]
        present = [rank for rank, key in enumerate(keys) if store.check([key])]
        beats = {}
        for rank, value in zip(present, store.multi_get([keys[rank] for rank in present]), strict=True):
            number, count, step, phase = value.decode().split(" ", 3)
            beats[rank] = Beat(int(number), int(count), int(step), phase)
        return beats


@dataclass(frozen=True)
class Lost:
    """What a comparison has shown."""

    ended: list[int]
    silent: list[int]
    behind: list[int]
    beats: dict[int, Beat]

    def sentence(self, is_late: bool) -> str:
        """One clause on the first kind there is."""
        if self.ended:
            return f"{_name(self.ended)} ended with an error of its own{self._last(self.ended)}"
        if self.silent:
            hangs = ("hangs: " if len(self.silent) == 1 else "hang: ") if is_late else ""
            return f"{_name(self.silent)} {hangs or 'gives '}no sign of life{self._last(self.silent)}"
        furthest = max(self.beats.values(), key=lambda beat: beat.count, default=None)
        if self.behind:
            are = "is" if len(self.behind) == 1 else "are"
            return f"{_name(self.behind)} {are} behind, in {self.beats[self.behind[0]]}; others in {furthest}"
        return f"all ranks are alive, in {furthest}" if self.beats else "no rank has reported"

    def _last(self, ranks: Sequence[int]) -> str:
        last = self.beats.get(ranks[0])
        return ", and it has never reported" if last is None else f" since {last}"


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"


def _within(seconds: float, function: Callable[[], Any]) -> tuple[bool, Any]:
    """(whether it returned in time, what it returned). A store that is silent blocks whoever asks it."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers), answers[0] if answers else None


def leave_soon() -> None:
    """After a rank was lost: end this process with status 1 in `LEAVE_S`, whatever its threads wait for."""

    def leave() -> None:
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(LEAVE_S, leave)
    timer.daemon = True
    timer.start()
