"""Stop handlers for the time of imports: import this module first.

A command that gets a stop signal during its imports exits at once with the status for that, since it has
written nothing yet. `command.install_stop_handlers` replaces these handlers when work begins. A program that
is not a command in tools/ keeps its own handlers.
"""

import os
import signal
import sys
from types import FrameType

STOPPED = 75  # same value as in command.py, which takes longer to import


def _exit_stopped(number: int, frame: FrameType | None) -> None:
    if "RANK" not in os.environ:  # a launcher that stops its ranks prints its own message
        # os.write and os._exit instead of print and sys.exit: an import may discard SystemExit, and the
        # signal may have interrupted a write to the same buffered stream
        os.write(2, b"stopped; run the same command again\n")
    os._exit(STOPPED)


def _is_command() -> bool:
    """Return whether this process runs a file in tools/ and is not a multiprocessing worker.

    In an installed wheel these files are in megatron/commands/.
    """
    process = sys.modules.get("multiprocessing.process")
    # A spawned worker imports the main module again; its parent decides when it ends.
    if process is not None and process.parent_process() is not None:
        return False
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    folder = os.path.dirname(os.path.abspath(file))
    installed = os.path.join(os.path.dirname(os.path.abspath(__file__)), "commands")
    return os.path.basename(folder) == "tools" or folder == installed


if _is_command():
    signal.signal(signal.SIGTERM, _exit_stopped)
    signal.signal(signal.SIGUSR1, _exit_stopped)  # from Slurm before the time limit
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # ignored under nohup
        signal.signal(signal.SIGHUP, _exit_stopped)
    # ignored in background jobs of a script; another handler belongs to the program that imported this module
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_stopped)
