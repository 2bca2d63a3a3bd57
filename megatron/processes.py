"""Orderly process shutdown: stop signals, and children that end with their parent."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # prctl(2)
PARENT = "MEGATRON_PARENT"  # <pid>:<seconds> in the environment of a child: see `end_after_parent`
POLL_S = 1.0


def stop_signals(*more: signal.Signals) -> tuple[signal.Signals, ...]:
    """Return the signals on which a process saves and stops: SIGINT, SIGTERM, `more`, and SIGHUP.

    SIGHUP is sent when a terminal is closed. It is omitted if it is ignored, as under nohup.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *more, *(() if ignored else (signal.SIGHUP,)))


def replace_lost_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal was closed (call after SIGHUP).

    Writing to a closed terminal raises EIO.
    """
    # The descriptors, not sys.stdout: C libraries and child processes write to them too.
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            # a closed terminal is still a character device, but isatty() is false for it
            if os.path.samestat(os.fstat(descriptor), os.stat(os.devnull)) or os.isatty(descriptor):
                continue
            if os.fstat(descriptor).st_mode & 0o170000 == 0o020000:  # S_IFMT, S_IFCHR: a character device
                null = os.open(os.devnull, os.O_WRONLY)
                # dup2 replaces the descriptor in one step: no other thread can open a file under its number
                # in between
                os.dup2(null, descriptor)
                os.close(null)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """Return a `preexec_fn` that makes the kernel send a child this signal when its parent ends.

    None on systems other than Linux. For the kernel the parent is the thread that starts the child, so start
    the child from a thread that lives as long as the process. Children of the child get no signal.
    """
    if sys.platform != "linux":
        return None
    # resolved before the fork: between fork and exec no code may wait for a lock
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def set_parent_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(1)

    return set_parent_death_signal


def parent_variable(grace_s: float) -> dict[str, str]:
    """Return the variable for a child's environment that ends it at most `grace_s` after this process."""
    return {PARENT: f"{os.getpid()}:{grace_s:g}"}


def end_after_parent() -> None:
    """Send SIGKILL to this process after its parent has ended, if `parent_variable` is set.

    The grace period of the variable leaves time to save. A process that hangs is ended too. Call this once,
    early in the process.
    """
    pid, _, grace_s = os.environ.pop(PARENT, "").partition(":")
    if pid:
        # popped above, so children of this process do not inherit it: their parent is another one
        words = int(pid), float(grace_s)
        threading.Thread(target=_kill_after_parent, args=words, name="end-after-parent", daemon=True).start()


def _kill_after_parent(parent: int, grace_s: float) -> None:
    # an orphan gets another parent (init or a subreaper), so the parent number changes
    while os.getppid() == parent:
        time.sleep(POLL_S)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
