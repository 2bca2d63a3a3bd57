"""Exit behaviour that all tools share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.command import report_error

# like the initialisation of a Cython module
SWALLOWING_MODULE = """
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
    signal.getsignal(signal.SIGTERM)
except: pass
"""
TOOL_CODE = """
import time
from megatron.command import install_stop_handlers, run_main
def main():
    install_stop_handlers()
    import swallows
    time.sleep(60)
    return 0
run_main(main)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_stop_signal_during_an_import_is_not_lost(root: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWING_MODULE.format(name=name))
    environment = {**os.environ, "PYTHONPATH": f"{root}:{tmp_path}"}
    command = [sys.executable, "-c", TOOL_CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert (done.returncode, done.stderr) == (75, "stopped; run the same command again\n")


def test_a_hostile_path_in_an_error_is_printed_inert(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(FileNotFoundError(2, "", "runs/\x1b[31m[red]")) == 1
    assert capsys.readouterr().err == "error: runs/\\x1b[31m[red]: no such file or folder\n"
    assert report_error(ValueError("a\n\tb\x07")) == 1
    assert capsys.readouterr().err == "error: a\n\tb\\x07\n"
