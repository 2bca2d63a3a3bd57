"""Import this first: a command that is asked to stop while it still imports ends with the status for that.

Nothing is written yet then, so the process ends at once. `command.stop_when_told` replaces this when work
begins. A program that is no command of tools/ keeps its own handlers.
"""

import os
import signal
import sys
from types import FrameType

STOPPED = 75  # as in command.py, which takes longer to import


def _stop(number: int, frame: FrameType | None) -> None:
    if "RANK" not in os.environ:  # a launcher that ends its ranks has had its say
        os.write(2, b"stopped; run the same command again\n")
    os._exit(STOPPED)


def _is_command() -> bool:
    """Whether this process runs a file of tools/, and not as a worker of multiprocessing."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        return False
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    return os.path.basename(os.path.dirname(os.path.abspath(file))) == "tools"


if _is_command():
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # ignored under nohup
        signal.signal(signal.SIGHUP, _stop)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
