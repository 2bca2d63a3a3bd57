"""Runs several ranks of a command on this machine and combines their exit statuses."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from megatron.cli import STOPPED, die_with_parent, replace_lost_terminal, stop_signals

GRACE_S = 30.0  # from SIGTERM to SIGKILL, for the remaining ranks after one has failed
POLL_S = 0.1


def run_ranks(command: Sequence[str], n_ranks: int) -> int:
    """Run a command once per rank with torchrun's environment variables; return the combined exit status.

    The status is 75 (stopped on request, run again to resume) if all ranks exit
    with 0 or 75 and at least one with 75; torchrun would return 1. If a rank fails,
    the others are terminated and its status is returned, 128 + the signal number
    for a killed rank. Signals are forwarded, and the ranks may take as long
    as they need to save. On Linux no rank outlives this process, however it ends.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    pending: list[int] = []  # signals to forward: one may arrive before the ranks are started

    def queue_signal(number: int, frame: FrameType | None) -> None:
        # A handler may interrupt any bytecode, also
        # Popen in the loop below. It only records
        # the signal; the waiting loop forwards
        # it when the list of ranks is complete.
        pending.append(number)
        if number == signal.SIGHUP:
            replace_lost_terminal()

    before = {number: signal.signal(number, queue_signal) for number in stop_signals(signal.SIGUSR1)}
    try:
        with reserve_port() as port:
            common = _build_common_environment(n_ranks, port)
            # A new session: otherwise the terminal sends
            # Ctrl-C to the rank directly as well, and a second
            # signal means "stop immediately, without saving".
            options: dict[str, Any] = {"start_new_session": True, "preexec_fn": die_with_parent()}
            for rank in range(n_ranks):
                variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=os.environ | variables, **options))
            return _wait_for_ranks(ranks, pending)
    finally:
        # the handlers are restored last: a second signal during the
        # grace period must not end this process before its ranks
        _terminate_ranks(ranks, pending)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a port for rank 0 to listen on inside a `with` block.

    Ranks start to listen seconds after they are started. A port that was only looked
    up could meanwhile be assigned to another process. The kernel does not assign
    a bound port, and on Linux sockets with SO_REUSEADDR, as torch's, may listen on it
    all the same. Other systems would refuse that, so there the port is released.
    """
    with socket.socket() as listener:
        if sys.platform == "linux":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # bound and never listening: a rank that
        # connects too early is refused and tries again
        listener.bind(("", 0))
        port = listener.getsockname()[1]
        if sys.platform != "linux":
            listener.close()
        yield port


def _build_common_environment(n_ranks: int, port: int) -> dict[str, str]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    # one thread per rank, as under torchrun, unless the variable is set
    if n_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def _wait_for_ranks(ranks: Sequence[subprocess.Popen[bytes]], pending: list[int]) -> int:
    # polling instead of wait(): the first failure of any
    # rank must end the others, and signals are forwarded
    while True:
        statuses = [rank.poll() for rank in ranks]
        failed = [status for status in statuses if status not in (None, 0, STOPPED)]
        if failed:
            # Popen reports death by signal n as -n; shells report 128 + n
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in statuses:
            return STOPPED if STOPPED in statuses else 0
        _forward_signals(pending, ranks)
        time.sleep(POLL_S)


def _forward_signals(pending: list[int], ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send each pending signal once to each running rank; signals that arrive meanwhile are appended."""
    while pending:
        number = pending.pop(0)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)


def _terminate_ranks(ranks: Sequence[subprocess.Popen[bytes]], pending: list[int]) -> None:
    """Terminate all ranks. A suspended rank (SIGSTOP) is continued, so that it receives its SIGTERM."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
            # the SIGTERM of a stopped process stays pending until it is continued
            rank.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        _forward_signals(pending, ranks)
        time.sleep(POLL_S)
