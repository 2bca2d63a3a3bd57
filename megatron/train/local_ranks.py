"""Several processes of one command on this machine, and the exit status that says what became of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from megatron.command import STOPPED
from megatron.processes import die_with_parent, end_after_parent, replace_lost_terminal, stop_signals

GRACE_S = 30.0  # from SIGTERM to SIGKILL, for those that a failed rank has left behind
POLL_S = 0.1


def run_ranks(command: Sequence[str], n_ranks: int) -> int:
    """Run a command once for each rank, with torchrun's variables; gives its status when all have ended.

    Where every rank ends with 0 or 75 and one with 75, that is 75: stopped when asked, run me again. torchrun
    answers 1 there. Where one fails, the others are ended and its status is given, 128 + the signal's number
    for one that was killed. Signals are passed on, and the ranks have what time they want to save;
    on Linux none outlives this process, whatever ends it.
    """
    ranks: list[subprocess.Popen] = []
    told: list[int] = []  # signals that are still to be passed on: one may come before there are ranks

    def remember(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if number == signal.SIGHUP:
            replace_lost_terminal()

    end_after_parent()
    before = {number: signal.signal(number, remember) for number in stop_signals(signal.SIGUSR1)}
    try:
        with held_port() as port:
            words = _common_words(n_ranks, port)
            for rank in range(n_ranks):
                mine = {**words, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                # a session of its own: Ctrl-C in a terminal would else arrive twice, and twice means at once
                ranks.append(
                    subprocess.Popen(
                        command, env=os.environ | mine, start_new_session=True, preexec_fn=die_with_parent()
                    )
                )
            return _wait(ranks, told)
    finally:
        _end(ranks, told)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def held_port() -> Iterator[int]:
    """A port for rank 0 to listen on, which nobody else is given for the length of a `with`.

    Ranks listen seconds after they are started, and who asks the kernel for any port may meanwhile get one
    that was only looked up. One that is bound is given to nobody, and Linux lets those listen on it who set
    SO_REUSEADDR, as torch does; other systems would refuse them.
    """
    with socket.socket() as holder:
        if sys.platform == "linux":
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port


def _common_words(n_ranks: int, port: int) -> dict[str, str]:
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    # one of several ranks has one core, as under torchrun, unless somebody says otherwise
    if n_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        words["OMP_NUM_THREADS"] = "1"
    return words


def _wait(ranks: Sequence[subprocess.Popen], told: list[int]) -> int:
    while True:
        statuses = [rank.poll() for rank in ranks]
        failed = [status for status in statuses if status not in (None, 0, STOPPED)]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in statuses:
            return STOPPED if STOPPED in statuses else 0
        _pass_on(told, ranks)
        time.sleep(POLL_S)


def _pass_on(told: list[int], ranks: Sequence[subprocess.Popen]) -> None:
    """Each signal to each rank once; those that come meanwhile are added at the end."""
    while told:
        number = told.pop(0)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)


def _end(ranks: Sequence[subprocess.Popen], told: list[int]) -> None:
    """Nothing is left running. A rank that is stopped (SIGSTOP) is woken, so that it ends too."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
            rank.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        _pass_on(told, ranks)
        time.sleep(POLL_S)
