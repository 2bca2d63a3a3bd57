"""A terminal for tests: a stream that is one, and the lines that its escape sequences leave on the screen."""

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


def render_screen(output: str) -> list[str]:
    """Return the lines on the screen after some output, without empty lines and spaces at the ends.

    Understands line feeds, carriage returns, cursor up (A) and the erasures of a line (K) and below (J);
    colours (m) are ignored, and other sequences fail.
    """
    lines, row, column, at = [""], 0, 0, 0
    while at < len(output):
        if match := ESCAPE.match(output, at):
            at, (count, kind) = match.end(), match.groups()
            assert kind in "AKJm", f"unexpected sequence {match.group()!r}"
            if kind == "A":
                row -= int(count or 1)
                assert row >= 0
            elif kind == "K":
                lines[row] = "" if count == "2" else lines[row][:column]
            elif kind == "J":
                lines[row:] = [lines[row][:column]]
            continue
        letter, at = output[at], at + 1
        if letter == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif letter == "\r":
            column = 0
        else:
            assert letter.isprintable(), f"unexpected character {letter!r}"
            lines[row] = lines[row][:column].ljust(column) + letter + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]
