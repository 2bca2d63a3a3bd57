"""Several processes of one command on this machine, and the exit status that says what became of them."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from megatron.checkpoint.preempt import SIGNALS
from megatron.command import STOPPED

GRACE_S = 30.0  # from SIGTERM to SIGKILL, for those that a failed rank has left behind
POLL_S = 0.1
PR_SET_PDEATHSIG = 1  # prctl(2)


def run_ranks(command: Sequence[str], n_ranks: int) -> int:
    """Run a command once for each rank, with torchrun's variables; gives its status when all have ended.

    Where every rank ends with 0 or 75 and one with 75, that is 75: stopped when asked, run me again. torchrun
    answers 1 there. Where one fails, the others are ended and its status is given, 128 + the signal's number
    for one that was killed. Signals are passed on, and the ranks have what time they want to save;
    on Linux none outlives this process, whatever ends it.
    """
    ranks: list[subprocess.Popen] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    die_with_parent = _kill_with_parent()
    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        words = _common_words(n_ranks)
        for rank in range(n_ranks):
            mine = {**words, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            # a session of its own: Ctrl-C in a terminal would else arrive twice, and twice means at once
            ranks.append(
                subprocess.Popen(
                    command, env=os.environ | mine, start_new_session=True, preexec_fn=die_with_parent
                )
            )
        return _wait(ranks)
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_with_parent() -> Callable[[], None] | None:
    """For a child to call before it starts its program: the kernel kills it when this process is gone."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec nothing may wait for a lock

    def ask_the_kernel() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))

    return ask_the_kernel


def _common_words(n_ranks: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    # each rank's share of the cores is one, as under torchrun, unless somebody says otherwise
    return words if "OMP_NUM_THREADS" in os.environ else words | {"OMP_NUM_THREADS": "1"}


def _wait(ranks: Sequence[subprocess.Popen]) -> int:
    while True:
        statuses = [rank.poll() for rank in ranks]
        failed = [status for status in statuses if status not in (None, 0, STOPPED)]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in statuses:
            return STOPPED if STOPPED in statuses else 0
        time.sleep(POLL_S)


def _end(ranks: Sequence[subprocess.Popen]) -> None:
    """Nothing is left running."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
