"""A terminal for tests: a stream that is one, and the lines that were written to it."""

import io
import re

import pytest

ESCAPE = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])")


class TerminalStream(io.StringIO):
    """Stream that reports to be a terminal of xterm's kind, 100 columns wide."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, term: str = "xterm-256color") -> None:
        super().__init__()
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("LINES", "30")
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            monkeypatch.delenv(name, raising=False)

    def isatty(self) -> bool:
        """Return True."""
        return True


def read_screen(output: str) -> list[str]:
    """Return the lines that some output has written, without escape sequences, in their order.

    Where rich draws the same place again, the lines of both times are returned.
    """
    lines = ESCAPE.sub("", output).replace("\r", "\n").split("\n")
    assert all(line.isprintable() for line in lines), lines
    return [line.rstrip() for line in lines if line.strip()]
