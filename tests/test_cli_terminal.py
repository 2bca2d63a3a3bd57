"""Output of commands: bars, tables and views on a terminal, and plain text elsewhere."""

import io
import sys

import pytest

from megatron.cli import LiveView, ProgressBar, format_si, format_table, print_table
from tests.screen import TerminalStream, read_screen

HEAD = ("run", "loss", "note")
# a name that is markup for rich, one that turns a terminal red, one that reverses the text's direction
ROWS = [("[red]a[/red]", "3.5", ""), ("b\x1b[31m", "12.25", "\u202ex"), ("c\r\nd", "1", "[link=x]")]
PLAIN = [
    "run            loss  note",
    "[red]a[/red]    3.5",
    r"b\x1b[31m     12.25  \u202ex",
    r"c\r\nd            1  [link=x]",
]


def test_a_table_has_aligned_columns_and_hostile_names_are_inert() -> None:
    assert format_table(HEAD, ROWS, ("run", "note")) == PLAIN
    assert format_table(HEAD, [], ("run", "note")) == ["run  loss  note"]


def test_a_terminal_shows_the_same_table_as_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(HEAD, ROWS, ("run", "note"))
    assert capsys.readouterr().out.splitlines() == PLAIN
    monkeypatch.setattr(sys, "stdout", out := TerminalStream(monkeypatch))
    print_table(HEAD, ROWS, ("run", "note"))
    assert "\x1b[1m" in out.getvalue()  # the heading is bold
    assert read_screen(out.getvalue()) == PLAIN


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_without_cursor_gets_plain_text(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setattr(sys, "stdout", out := TerminalStream(monkeypatch, term))
    print_table(HEAD, ROWS, ("run", "note"))
    assert out.getvalue().splitlines() == PLAIN
    monkeypatch.setattr(sys, "stderr", err := TerminalStream(monkeypatch, term))
    with ProgressBar("copying", 10, "tokens") as bar:
        bar.update(10)
    assert err.getvalue() == ""


def test_a_bar_shows_amount_rate_and_time_left_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := TerminalStream(monkeypatch))
    seconds = iter(range(100))
    with ProgressBar("[red]x\x1b[31m", 8000, "B", n_begun=1000, clock=lambda: next(seconds)) as bar:
        for _ in range(3):
            bar.update(500)
        # 1,500 bytes in 3 s; 5,500 bytes are left
        line = read_screen(err.getvalue())[-1]
        assert line.startswith(r"[red]x\x1b[31m ")
        assert line.endswith(" 31%, 2.50k/8.00kB, 500B/s, 0:00:11 left")
    assert "\x1b[?25l" not in err.getvalue()  # the cursor is never hidden


def test_a_log_gets_a_line_every_30_seconds_and_a_short_job_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    seconds = iter(range(0, 1000, 10))
    with ProgressBar("merging", 100, "tokens", clock=lambda: next(seconds)) as bar:
        for _ in range(7):
            bar.update(10)
    assert err.getvalue() == (
        "merging: 30%, 30/100 tokens, 1 tokens/s, 0:01:10 left\n"
        "merging: 60%, 60/100 tokens, 1 tokens/s, 0:00:40 left\n"
    )


def test_a_line_printed_above_a_view_is_inert_and_the_view_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    view = LiveView(out := TerminalStream(monkeypatch))
    view.show(HEAD, ROWS, ("run", "note"), ["[b]3[/b] runs\x1b[2J"])
    shown = [*PLAIN, r"[b]3[/b] runs\x1b[2J"]
    assert read_screen(out.getvalue()) == shown
    view.print_line("done: [red]\x1b[2J")
    assert read_screen(out.getvalue()) == [*shown, r"done: [red]\x1b[2J", *shown]
    view.close()
    assert out.getvalue().count("\x1b[2K") >= 2 * len(shown)  # erased before the line, and at the end


AMOUNTS = {0: "0", 999: "999", 9994: "9.99k", 9996: "10.0k", 999_600: "1.00M", 0.5: "0.50", 2.5e12: "2.50T"}


@pytest.mark.parametrize(("number", "text"), AMOUNTS.items())
def test_amounts_have_three_digits(number: float, text: str) -> None:
    assert format_si(number) == text
