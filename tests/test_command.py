"""Exit behaviour that all tools share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.cli import report_error
from tests.screen import TerminalStream, render_screen
from tests.tool_modules import load_tool

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
from megatron.cli import install_stop_handlers, run_main
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


@pytest.mark.parametrize("tool", ["sweep", "register_corpus", "fit_law"])
def test_help_on_a_terminal_has_colours_and_the_text_of_a_pipe(
    root: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich_argparse")
    parser = load_tool(root / "tools" / f"{tool}.py").build_parser()
    out = TerminalStream(monkeypatch)
    plain = parser.format_help()
    monkeypatch.setattr(sys, "stdout", out)
    coloured = parser.format_help()
    assert "\x1b[" in coloured and "\x1b" not in plain
    assert render_screen(coloured) == [line.rstrip() for line in plain.splitlines() if line.strip()]
    monkeypatch.setenv("TERM", "dumb")
    assert parser.format_help() == plain
