r"""Shared parts of all commands: stop signals, terminal output, help, errors, and the command `scaling`.

    scaling                        list the sub-commands; also --help and help
    scaling help train             the same as scaling train --help
    scaling --version              print the version
    scaling train CONFIG.yaml      the same as python tools/pretrain.py CONFIG.yaml
    torchrun --nproc-per-node 2 -m megatron.cli train CONFIG.yaml

A sub-command runs its file as the main module. The files are in tools/
of a checkout, and in megatron/commands/ of an installed wheel,
where setup.py copies them: a wheel has no package named tools.

rich draws on terminals. A stream that is not a terminal (a pipe, a file, a Slurm log, CI)
and a terminal with TERM=dumb get plain text without escapes: tables with the same columns,
and one line of progress every PLAIN_INTERVAL_S. NO_COLOR turns colours off. Names of runs
and files are printed inert: a control character as `\x1b`, and `[red]` as it stands.
"""

import argparse
import ctypes
import errno
import importlib.util
import math
import os
import re
import shutil
import signal
import stat
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO

if TYPE_CHECKING:  # rich takes 40 ms to import: only commands that draw on a terminal load it
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table

STOPPED = 75  # EX_TEMPFAIL in sysexits.h: the caller should run the command again
STOPPED_MESSAGE = "stopped; run the same command again"
STATUSES = "Exit status: 0 done, 1 failed, 2 wrong usage"
DISTRIBUTION = "megatron-scaling"  # in pyproject.toml
PACKAGE_NAMES = {"yaml": "pyyaml"}  # module -> package, where the names differ
PR_SET_PDEATHSIG = 1  # prctl(2)
DEFAULT_HANDLERS: dict[signal.Signals, Any] = {  # for the signals that stop a command
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
}
ERROR_HINTS = {  # errno -> explanation for the user who typed the path, and a fix
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "a file with this name exists; choose another place",
    errno.ENOTDIR: "got a file, expected a folder; choose another place",
    errno.EISDIR: "got a folder, expected a file; choose another name",
    errno.EACCES: "permission denied; choose another place, or ask its owner",
    errno.EROFS: "read-only file system; choose another place",
    errno.ENOSPC: "the disk is full; make room and run the same command again",
}
REFRESH_INTERVAL_S = 0.2  # between two drawings of a bar on a terminal
PLAIN_INTERVAL_S = 30.0  # between two lines of progress in a log; a shorter job writes none
# Options of rich: a drawing thread could hold a lock while workers are forked,
# and `2> log` must receive standard error also while a table is shown.
DRAWING: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
RATE_WINDOW_S = 60.0  # a rate is the mean over this time
GAP = 2  # spaces between columns
MIN_TEXT_WIDTH = 24  # longer names are folded on a narrow terminal, down to this width
PROGRAM = "scaling"
PACKAGE = Path(__file__).resolve().parent
INSTALLED = PACKAGE / "commands"
TOOLS = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "tools"
HEAD = f"""usage: {PROGRAM} SUB-COMMAND ...

Train models on a budget of text, and fit scaling laws to their losses."""
FOOT = f"""{PROGRAM} SUB-COMMAND --help lists its arguments and examples.
{STATUSES}, {STOPPED} stopped by a signal."""
GROUPS = {  # in the order of a study: sub-command -> file in tools/
    "setup": {"check": "check_environment", "docs": "make_docs"},
    "prepare text": {
        "corpus": "prepare_corpus",
        "tokenizer": "train_tokenizer",
        "prepare": "preprocess_data_many_cores",
        "inspect": "inspect_data",
        "merge": "merge_datasets",
        "subset": "subset_corpus",
    }
    | dict.fromkeys(("register", "mixture", "serve"), "mixtures"),
    "plan": dict.fromkeys(("init", "sizes", "plan", "choose"), "plan"),
    "train": {
        "train": "pretrain",
        "gpt": "pretrain_gpt",
        "diff-gpt": "pretrain_diff_gpt",
        "megatron": "from_megatron",
        "ranks": "start_ranks",
        "sweep": "sweep",
        "convert": "convert_checkpoint",
    },
    "score": {
        "validate": "validate",
        "evaluate": "evaluate_downstream",
        "generate": "generate_text",
        "compare": "laws",
        "gain": "laws",
    },
    "fit": {
        "collect": "collect",
        "fit": "fit_law",
        "frontier": "laws",
        "downstream": "laws",
        "power-law": "laws",
        "predict": "laws",
        "curve": "laws",
        "mix": "laws",
        "crossover": "laws",
    },
    "report": {"report": "make_report"},
}
REMOVED = dict.fromkeys(("download", "download_assets"), "`hf download`, as in DATA.md") | dict.fromkeys(
    ("reference", "config_reference", "migration", "migration_page"), "`make docs`"
)
SUBCOMMANDS = {name: tool for group in GROUPS.values() for name, tool in group.items()}
ACTIONS = ("laws", "mixtures", "plan")  # files that serve several sub-commands: their first argument


# Stop signals. A command exits at once while it imports,
# and then raises or records them as its work needs.


def _exit_stopped(number: int, frame: FrameType | None) -> None:
    """Handle a stop signal during imports: exit at once."""
    if "RANK" not in os.environ:  # a launcher that stops its ranks prints its own message
        # os.write and os._exit instead of print and sys.exit: an import may discard
        # SystemExit, and the signal may have interrupted
        # a write to the same buffered stream
        os.write(2, f"{STOPPED_MESSAGE}\n".encode())
    os._exit(STOPPED)


def exit_on_stop_signals() -> None:
    """Exit with status 75 on a stop signal until `run_main`: during its imports a command writes nothing."""
    for number, default in DEFAULT_HANDLERS.items():
        # nohup and background jobs of scripts ignore signals,
        # and a program that imports this has its own
        if signal.getsignal(number) == default:
            signal.signal(number, _exit_stopped)


def restore_stop_signals() -> None:
    """Undo `exit_on_stop_signals`."""
    for number, default in DEFAULT_HANDLERS.items():
        if signal.getsignal(number) == _exit_stopped:
            signal.signal(number, default)


def install_stop_handlers() -> None:
    """Raise KeyboardInterrupt on SIGTERM, SIGHUP and SIGUSR1 as on Ctrl-C.

    Slurm sends SIGUSR1 before the time limit of a job
    (--signal in examples_scaling/training/*_slurm.sh).

    Modules compiled by Cython, such as numpy.random, are initialised
    inside an `except: pass`, in which an exception is lost. A signal
    that arrives during an import therefore ends the process, like kill -9.
    """

    def handle_stop_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            replace_lost_terminal()
        if _is_importing(frame):
            _exit_stopped(number, frame)
        raise KeyboardInterrupt

    # a shell script starts background jobs (`command &`) with
    # SIGINT ignored, and they must continue to ignore it
    sigint_is_enabled = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    for number in stop_signals(signal.SIGUSR1):
        if number != signal.SIGINT or sigint_is_enabled:
            signal.signal(number, handle_stop_signal)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether the import machinery is on the call stack of a frame."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def stop_signals(*more: signal.Signals) -> tuple[signal.Signals, ...]:
    """Return the signals on which a process saves and stops: SIGINT, SIGTERM, `more`, and SIGHUP.

    SIGHUP is sent when a terminal is closed. It is omitted if it is ignored, as under nohup.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *more, *(() if ignored else (signal.SIGHUP,)))


def replace_lost_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal was closed (call after SIGHUP).

    Writing to a closed terminal raises EIO.
    """
    # The descriptors, not sys.stdout: C libraries
    # and child processes write to them too.
    for descriptor in (1, 2):
        with suppress(OSError):
            # a closed terminal is still a character
            # device, but isatty() is false for it
            if os.path.samestat(os.fstat(descriptor), os.stat(os.devnull)) or os.isatty(descriptor):
                continue
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                null = os.open(os.devnull, os.O_WRONLY)
                # dup2 replaces the descriptor in one step: no other
                # thread can open a file under its number in between
                os.dup2(null, descriptor)
                os.close(null)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """Return a `preexec_fn` that makes the kernel send a child this signal when its parent ends.

    None on systems other than Linux. For the kernel the parent
    is the thread that starts the child, so start the child from a thread
    that lives as long as the process. Children of the child get no signal.
    """
    if sys.platform != "linux":
        return None
    # resolved before the fork: between fork and exec no code may wait for a lock
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def set_parent_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(1)

    return set_parent_death_signal


# Output on terminals and elsewhere. rich is imported only to draw.


def is_terminal(stream: TextIO) -> bool:
    """Return whether rich can draw on a stream: a terminal with cursor movements."""
    has_cursor = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    return has_cursor and importlib.util.find_spec("rich") is not None


def escape_controls(text: str, allowed: str = "") -> str:
    r"""Replace control characters by their escapes, such as `\x1b`, except those in `allowed`.

    A control character in a name could move the cursor,
    change colours or reverse the direction of text.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in allowed else ascii(c)[1:-1] for c in text)


def open_console(stream: TextIO) -> "Console":
    """Return rich's console for a terminal. It interprets no markup in text."""
    from rich.console import Console

    console = Console(file=stream, force_terminal=True, markup=False, emoji=False, highlight=False)
    # rich hides the cursor while it draws. After
    # Ctrl-Z or kill -9 the shell would have none.
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign]  # this instance only
    return console


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> list[str]:
    """Return lines of aligned columns: those named in `left` to the left, others to the right."""
    lines = [[escape_controls(cell) for cell in row] for row in (head, *rows)]
    # the heading is a line like the others, so
    # it also counts for the width of a column
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = []
    for line in lines:
        cells = zip(head, line, widths, strict=True)
        words = (cell.ljust(width) if name in left else cell.rjust(width) for name, cell, width in cells)
        aligned.append((" " * GAP).join(words).rstrip())
    return aligned


def build_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> "Table":
    """Return rich's table of the same columns. Text is folded on a narrow terminal, numbers are never cut."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for i, name in enumerate(head):
        numeric = name not in left
        widest = max([len(name), *(len(escape_controls(row[i])) for row in rows)])
        table.add_column(
            Text(name),
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric,
            min_width=widest if numeric else min(widest, MIN_TEXT_WIDTH),
        )
    for row in rows:
        table.add_row(*(Text(escape_controls(cell)) for cell in row))
    return table


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> None:
    """Print a table on standard output. Columns named in `left` are aligned to the left."""
    if is_terminal(sys.stdout):
        open_console(sys.stdout).print(build_table(head, rows, left), crop=False)
    else:
        print("\n".join(format_table(head, rows, left)))


class LiveView:
    """Table at the bottom of a terminal, redrawn in place. Elsewhere only `print_line` has output."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.is_live = out, is_terminal(out)
        self._live: Live | None = None
        if self.is_live:
            from rich import live

            self._live = live.Live(console=open_console(out), transient=True, **DRAWING)

    def show(
        self, head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str], footer: Sequence[str]
    ) -> None:
        """Replace the table, and the lines below it."""
        if self._live is not None:
            from rich.console import Group
            from rich.text import Text

            texts = [Text(escape_controls(line)) for line in footer]
            self._live.start()
            self._live.update(Group(build_table(head, rows, left), *texts), refresh=True)

    def print_line(self, line: str) -> None:
        """Print a permanent line above the table."""
        line = escape_controls(line)
        if self._live is None:
            self.out.write(line + "\n")
        else:
            # soft_wrap: the terminal wraps a long
            # line, so that it is copied as one line
            self._live.console.print(line, soft_wrap=True)
        self.out.flush()

    def close(self) -> None:
        """Erase the table from the screen."""
        if self._live is not None:
            self._live.stop()


class ProgressBar:
    """Context manager that shows the progress of a job on standard error: bar, amount, rate and time left.

    Threads that share a bar need a lock.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        unit: str,
        n_begun: int = 0,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total`: None if unknown. `unit`: "B" or a plural noun. `n_begun`: the part finished earlier."""
        self.title, self.total, self.unit = escape_controls(title), total, unit
        self.done, self.note = n_begun, ""
        self.quiet, self.stream, self._clock = quiet, sys.stderr, clock
        self.is_live = not quiet and is_terminal(self.stream)
        self._interval = REFRESH_INTERVAL_S if self.is_live else PLAIN_INTERVAL_S
        self._next_s = float("inf")
        self._samples: deque[tuple[float, int]] = deque()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        now = self._clock()
        self._samples.append((now, self.done))
        if not self.quiet:
            self._next_s = now + self._interval
        if self.is_live:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[text]}", markup=False),
                console=open_console(self.stream),
                expand=True,
                **DRAWING,
            )
            self._bar.add_task(self.title, total=self.total, completed=self.done, text="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._draw(self._clock())
            self._bar.stop()

    def update(self, n: int = 1) -> None:
        """Add to the finished amount."""
        self.done += n
        now = self._clock()
        if now >= self._next_s:
            self._next_s = now + self._interval
            self._draw(now)

    def _draw(self, now: float) -> None:
        text = self._format_state(now)
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.update(task, completed=self.done, text=text, refresh=True)
        else:
            self.stream.write(f"{self.title}: {text}\n")
            self.stream.flush()

    def _format_state(self, now: float) -> str:
        """Return the share, amount, rate, time left and note, as far as they are defined."""
        while len(self._samples) > 1 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        self._samples.append((now, self.done))
        rate = (self.done - before) / (now - then) if now > then else 0.0
        unit = self.unit if self.unit == "B" else f" {self.unit}"
        parts = [f"{format_si(self.done)}{unit}"]
        if self.total:
            parts = [
                f"{self.done / self.total:.0%}",
                f"{format_si(self.done)}/{format_si(self.total)}{unit}",
            ]
        if rate > 0:
            parts.append(f"{format_si(rate)}{unit}/s")
            if self.total:
                left = timedelta(seconds=round(max(self.total - self.done, 0) / rate))
                parts.append(f"{left} left")
        return escape_controls(", ".join([*parts, *filter(None, [self.note])]))


def format_si(number: float) -> str:
    """Format a number with three digits and a decimal prefix: 999, 2.50k, 17.6M."""
    size, prefixes = float(number), ["", "k", "M", "G", "T", "P"]
    while size >= 999.5 and len(prefixes) > 1:
        size, prefixes = size / 1000, prefixes[1:]
    if float(number).is_integer() and number < 1000:
        return f"{number:.0f}"
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f}{prefixes[0]}"


# Arguments and help, by argparse.


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter that keeps the line breaks of descriptions and adds each option's default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        help_text = action.help or ""
        default = action.default
        if default is argparse.SUPPRESS or default is None or default is False or default in ([], (), ""):
            return help_text
        values = default if isinstance(default, (list, tuple)) else [default]
        shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
        # argparse expands % in help texts
        return f"{help_text} (default {shown.replace('%', '%%')})".lstrip()


def create_formatter(prog: str, **options: Any) -> argparse.HelpFormatter:
    """Create a formatter of help: in colours on a terminal, with the text that other outputs get."""
    if not is_terminal(sys.stdout) or importlib.util.find_spec("rich_argparse") is None:
        return HelpFormatter(prog, **options)
    from rich_argparse import RawDescriptionRichHelpFormatter

    class ColourFormatter(HelpFormatter, RawDescriptionRichHelpFormatter):
        """Formatter by rich that keeps our headings, and `[` in texts."""

        group_name_formatter = str
        text_markup = help_markup = False

    return ColourFormatter(prog, **options)


class ToolParser(argparse.ArgumentParser):
    """Argument parser that suggests the nearest option for an unknown one."""

    arguments: Sequence[str] = ()
    removed: Mapping[str, str] = {}  # as in `create_parser`
    takes_ranks = False

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and keep the arguments for the suggestions of `error`."""
        self.arguments = sys.argv[1:] if args is None else list(args)
        if self.takes_ranks:
            self.arguments = self._strip_local_rank(self.arguments)
        return super().parse_known_args(self.arguments, namespace)

    def _strip_local_rank(self, words: Sequence[str]) -> list[str]:
        """Remove `--local_rank=N`, which the launchers of DeepSpeed and torch add beside LOCAL_RANK."""
        return [word for word in words if not re.fullmatch(r"--local[_-]rank=(-1|[0-9]+)", word)]

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a one-line message, with suggestions for misspelt options."""
        # the parsers of actions (`scaling register
        # CATALOG add`) leave unknown options to this one
        parsers: list[argparse.ArgumentParser] = [self]
        for parser in parsers:  # grows: actions may have actions
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
        names = [name for parser in parsers for name in parser._option_string_actions]
        options = {name.lstrip("-"): name for name in names}
        words = [word.partition("=")[0] for word in self.arguments]
        for word in words:
            if word in self.removed:
                self.exit(2, f"{self.prog}: error: {word}: removed. {self.removed[word]} (see --help)\n")
            # argparse accepts unique prefixes, so
            # a prefix of an option is not misspelt
            is_option = word.startswith("--") and not any(name.startswith(word) for name in names)
            if is_option and (nearest := get_close_matches(word.lstrip("-"), options, 1)):
                message += f"; {word}: did you mean {options[nearest[0]]}?"
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def create_parser(
    doc: str, may_stop: bool = False, takes_ranks: bool = False, removed: Mapping[str, str] | None = None,
    parser_class: type[ToolParser] = ToolParser,
) -> ToolParser:  # fmt: skip
    """Create a parser whose help is a module's docstring: the first paragraph, the options, then the rest.

    The rest begins with example commands that can be pasted.

    may_stop     the command saves its work on a stop signal and exits with status 75
    takes_ranks  a launcher may start the command once for each rank
    removed      options of earlier versions -> replacement, without a period
    """
    head, _, rest = _replace_commands(doc).strip().partition("\n\n")
    stopped = f", {STOPPED} stopped by a signal (run the same command again to resume)" if may_stop else ""
    examples, _, notes = rest.partition("\n\n")
    examples = textwrap.indent(textwrap.dedent(examples), "    ")
    sections = [f"examples:\n{examples}", *([notes] if notes else []), f"{STATUSES}{stopped}."]
    # a class attribute, since argparse makes the parsers of actions by the class of their parent
    parser_class = type("ToolParser", (parser_class,), {"removed": removed or {}})
    parser = parser_class(description=head, epilog="\n\n".join(sections), formatter_class=create_formatter)
    parser.takes_ranks = takes_ranks
    return parser


def _replace_commands(text: str) -> str:
    """Replace `python tools/x.py` by the sub-command where the user has typed one."""
    if sys.argv[0].split(" ")[0] != PROGRAM:  # set by `run_tool`
        return text
    names = {tool: f"{PROGRAM} {name}" for name, tool in SUBCOMMANDS.items() if tool not in ACTIONS}
    return re.sub(r"python tools/(\w+)\.py", lambda match: names.get(match[1], match[0]), text)


def add_action(actions: Any, name: str, run: Callable[..., Any]) -> argparse.ArgumentParser:
    """Add an action to a command and return its parser. Its help is the docstring of the function `run`.

    The docstring is a sentence and an indented example.
    """
    sentence, _, example = _replace_commands(run.__doc__ or "").partition("\n\n")
    epilog = f"example:\n{textwrap.indent(textwrap.dedent(example).rstrip(), '    ')}"
    texts = {"help": sentence, "description": sentence, "epilog": epilog}
    parser = actions.add_parser(name, formatter_class=create_formatter, **texts)
    parser.set_defaults(run=run, refuse=parser.error)
    return parser


def positive_float(word: str) -> float:
    """Parse a finite number above 0 (an argparse type)."""
    try:
        number = float(word)
    except ValueError:
        number = 0.0
    # false for NaN as well
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"got '{word}', expected a number above 0")
    return number


def positive_int(word: str) -> int:
    """Parse a whole number above 0 (an argparse type)."""
    return _parse_int_at_least(1, word)


def non_negative_int(word: str) -> int:
    """Parse a whole number of 0 or more (an argparse type)."""
    return _parse_int_at_least(0, word)


def _parse_int_at_least(minimum: int, word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"got '{word}', expected a whole number of {minimum} or more")
    return number


# Exit statuses and error messages.


def run_main(main: Callable[[], int]) -> NoReturn:
    """Exit the process with the status that `main` returns.

    An OSError, a ValueError and a missing package are printed as one sentence.
    Ctrl-C and a closed pipe (`| head`) print no traceback.
    """
    restore_stop_signals()
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(STOPPED_MESSAGE, file=sys.stderr)
        status = STOPPED
    except BrokenPipeError:
        # the flush at exit must not raise again
        # The buffer still has text for the closed pipe.
        # Python flushes it at exit, now to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except (OSError, ValueError) as error:
        status = report_error(error)
    except ImportError as error:
        if not (sentence := explain_import_error(error)):
            raise
        status = report_error(ValueError(sentence))
    sys.exit(status)


def explain_import_error(error: ImportError) -> str:
    """Return a sentence with the extra that installs a missing package; '' if none does."""
    if error.name == "megatron._csrc":
        return str(error)
    if error.name == DISTRIBUTION:
        return f"{DISTRIBUTION}: not installed. Run pip install -e . in the checkout."
    import importlib.metadata  # imported on demand: slow

    requirements: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    extra = find_extra(error.name or "", requirements) if isinstance(error, ModuleNotFoundError) else ""
    return extra and f"{error.name}: not installed. This needs pip install '{DISTRIBUTION}[{extra}]'."


def find_extra(module: str, requirements: Iterable[str]) -> str:
    """Return the first extra that installs a module; '' if none does.

    requirements  as in a wheel's metadata: "PyYAML>=6.0; extra == 'laws'"
    """
    package = PACKAGE_NAMES.get(module, module).replace("_", "-")
    for line in requirements:
        match = re.match(r"""([\w.-]+).*\bextra == ["']([\w-]+)["']""", line)
        if match and match[1].replace("_", "-").lower() == package.lower():
            return match[2]
    return ""


def report_error(error: Exception) -> int:
    """Print an error as one sentence on standard error, and return the exit status."""
    # a path or a line of a file may contain escape sequences
    message = escape_controls(format_error(error), allowed="\n\t")
    print(f"error: {message}", file=sys.stderr)
    return 1


def format_error(error: Exception) -> str:
    """Return an error's message. For an error of the operating system: the path and an explanation."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    reason = ERROR_HINTS.get(error.errno) or error.strerror or os.strerror(error.errno)
    path = error.filename2 or error.filename  # for a failed rename: the target, not the partial file
    return f"{str(path).removesuffix('.partial')}: {reason}" if path is not None else reason


def shorten_path(path: Path) -> Path:
    """Return a path relative to the working directory if it is below it, so that it is short to paste."""
    cwd = Path.cwd()
    return path.relative_to(cwd) if path.is_relative_to(cwd) else path


# The command `scaling` with its sub-commands.


def find_tool(name: str) -> Path:
    """Return the file of a sub-command."""
    return TOOLS / f"{SUBCOMMANDS[name]}.py"


def read_summary(name: str) -> str:
    """Return a sentence about a sub-command from a docstring, without importing its file."""
    text = find_tool(name).read_text(encoding="utf-8")
    if SUBCOMMANDS[name] in ACTIONS:
        text = text.partition(f"def run_{name.replace('-', '_')}(")[2].partition('    """')[2]
    return text.partition("\n")[0].removeprefix('"""')


def list_lines(width: int | None) -> list[str]:
    """Return the list of sub-commands with a line each, cut to a width. Headings are not indented."""
    indent = max(map(len, SUBCOMMANDS)) + 2
    lines = []
    for group, names in GROUPS.items():
        lines += ["", group]
        for name in names:
            line = f"  {name:<{indent}}{read_summary(name)}"
            lines.append(line if width is None or len(line) <= width else f"{line[: width - 2]}..")
    return lines


def print_list() -> None:
    """Print the usage and the sub-commands, on a terminal with one line each."""
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    print("\n".join([HEAD, *list_lines(width), "", FOOT]))


def report_unknown(word: str) -> int:
    """Print the nearest sub-command to an unknown one, and return the exit status of wrong usage."""
    # people who know the files in tools/ type their names
    tools = {tool: name for name, tool in SUBCOMMANDS.items() if tool not in ACTIONS}
    names = {name: name for name in SUBCOMMANDS} | tools
    name = word.lower().removesuffix(".py")
    nearest = get_close_matches(name, names, 1)
    hint = f"; did you mean {names[nearest[0]]}?" if nearest else ""
    hint = f"; it is replaced by {REMOVED[name]}" if name in REMOVED else hint
    message = f"got '{escape_controls(word)}', expected a sub-command{hint} (see {PROGRAM} --help)"
    print(f"{PROGRAM}: error: {message}", file=sys.stderr)
    return 2


def run_tool(name: str, words: Sequence[str]) -> None:
    """Run the file of a sub-command as the main module, as `python tools/x.py` does; it ends the process."""
    path = str(find_tool(name))
    # argparse takes the program's name from the first word
    sys.argv = [*((PROGRAM, name) if SUBCOMMANDS[name] in ACTIONS else (f"{PROGRAM} {name}",)), *words]
    # spawned workers look for the file of the main module
    main_module = ModuleType("__main__")
    main_module.__file__ = path
    sys.modules["__main__"] = main_module
    code = SourceFileLoader("__main__", path).get_code("__main__")
    assert code is not None
    exit_on_stop_signals()
    exec(code, main_module.__dict__)


def main() -> int:
    """Run the sub-command that is named by the first argument, or list all."""
    words = sys.argv[1:]
    if words == ["--version"]:
        from importlib.metadata import version  # imported on demand: slow

        print(f"{DISTRIBUTION} {version(DISTRIBUTION)}")
        return 0
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print_list()
        return 0
    if words[0] not in SUBCOMMANDS:
        return report_unknown(words[0])
    run_tool(words[0], words[1:])
    return 0


def run_console() -> None:
    """Entry point of the console script."""
    run_main(main)


def run_mixture_server() -> None:
    """Entry point of the console script `mixtera-server`: `scaling serve` with its arguments."""
    sys.argv.insert(1, "serve")
    run_console()


def _runs_tool() -> bool:
    """Return whether this process runs a file in tools/ and is not a multiprocessing worker."""
    process = sys.modules.get("multiprocessing.process")
    # A spawned worker imports the main module
    # again; its parent decides when it ends.
    if process is not None and process.parent_process() is not None:
        return False
    return Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve().parent == TOOLS


if _runs_tool():
    exit_on_stop_signals()

if __name__ == "__main__":
    # `python -m megatron.cli` runs this file under another
    # name; the tools use the module of its own name
    from megatron import cli

    cli.run_console()
