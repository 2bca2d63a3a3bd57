"""Processes that stop in order: the signals that ask for it, and children that end with their parent."""

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
    """The signals that ask a process to save and stop: SIGINT, SIGTERM, `more`, and SIGHUP.

    SIGHUP comes when a terminal is closed; it is left out where it is ignored, as under nohup.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *more, *(() if ignored else (signal.SIGHUP,)))


def replace_lost_terminal() -> None:
    """After SIGHUP: let output that went to a terminal which is gone go nowhere, instead of raising EIO."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            # a terminal that hung up still is a character device, and answers no question
            if os.path.samestat(os.fstat(descriptor), os.stat(os.devnull)) or os.isatty(descriptor):
                continue
            if os.fstat(descriptor).st_mode & 0o170000 == 0o020000:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """For `preexec_fn`: the kernel sends a child this signal when its parent is gone. None where it cannot.

    "Parent" is the thread that starts the child, for the kernel: start it from one that lives as long as the
    process. Children of the child are told nothing.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec nothing may wait for a lock
    parent = os.getpid()

    def set_parent_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # gone before the kernel was asked
            os._exit(1)

    return set_parent_death_signal


def parent_variable(grace_s: float) -> dict[str, str]:
    """For a child's environment: it is to end `grace_s` after this process at the latest."""
    return {PARENT: f"{os.getpid()}:{grace_s:g}"}


def end_after_parent() -> None:
    """Where `parent_variable` is set: SIGKILL this process so long after its parent has ended.

    The time is for saving; a process that hangs does not stay behind. Call it once, early.
    """
    pid, _, grace_s = os.environ.pop(PARENT, "").partition(":")
    if pid:
        words = int(pid), float(grace_s)
        threading.Thread(target=_end_after, args=words, name="end-after-parent", daemon=True).start()


def _end_after(parent: int, grace_s: float) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
