"""Children that end with their parent in every case, and stop signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.cli import PARENT, stop_signals

PARENT_CODE = """
import signal, subprocess, sys, os
from megatron.cli import die_with_parent, parent_variable
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], env=os.environ | parent_variable(1.0), start_new_session=True,
    preexec_fn=die_with_parent(signal.SIGTERM),
)
child.wait()
"""
DEAF_CODE = """
import os, signal, sys, time
from megatron.cli import end_after_parent
signal.signal(signal.SIGTERM, lambda *_: open(os.environ["HEARD"], "w").close())
end_after_parent()
open(os.environ["READY"], "w").write(str(os.getpid()))
while True:
    time.sleep(0.1)
"""


def is_running(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(true, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at a parent's end is Linux's")
def test_a_child_that_does_not_end_when_its_parent_is_killed_is_ended_later(
    root: Path, tmp_path: Path
) -> None:
    ready, heard = tmp_path / "ready", tmp_path / "heard"
    environment = {**os.environ, "READY": str(ready), "HEARD": str(heard)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT_CODE, DEAF_CODE], cwd=root, env=environment)
    wait_until(lambda: ready.exists() and ready.read_text(), 60)
    child = int(ready.read_text())
    parent.kill()
    parent.wait()
    try:
        wait_until(heard.exists, 10)  # SIGTERM at once
        assert is_running(child)
        wait_until(lambda: not is_running(child), 30)  # SIGKILL after the grace period of one second
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def test_without_the_variable_a_process_does_not_depend_on_its_parent(root: Path) -> None:
    assert PARENT not in os.environ
    code = (
        "import threading\n"
        "from megatron.cli import end_after_parent\n"
        "end_after_parent()\n"
        "print(threading.active_count())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n"


def test_sighup_asks_to_stop_unless_it_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert set(stop_signals(signal.SIGUSR1)) == {
            signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
        }  # fmt: skip
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert set(stop_signals()) == {signal.SIGINT, signal.SIGTERM}
    finally:
        signal.signal(signal.SIGHUP, before)
