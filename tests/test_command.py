"""What the tools have in common: how they end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# as the beginning of a module that Cython made
SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
    signal.getsignal(signal.SIGTERM)
except: pass
"""
TOOL = """
import time
from megatron.command import run, stop_when_told
def main():
    stop_when_told()
    import swallows
    time.sleep(60)
    return 0
run(main)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_wish_to_stop_that_comes_within_an_import_is_not_lost(
    root: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS.format(name=name))
    environment = {**os.environ, "PYTHONPATH": f"{root}:{tmp_path}"}
    command = [sys.executable, "-c", TOOL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert (done.returncode, done.stderr) == (75, "stopped; run the same command again\n")
