"""Shared parts of the commands in tools/: help layout, argument types, error messages and exit statuses."""

import argparse
import errno
import importlib.util
import math
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from megatron.cli import escape_controls, is_terminal, replace_lost_terminal, stop_signals

STOPPED = 75  # EX_TEMPFAIL in sysexits.h: the caller should run the command again
DISTRIBUTION = "megatron-scaling"  # in pyproject.toml
PACKAGE_NAMES = {"yaml": "pyyaml"}  # module -> package, where the names differ
LOCAL_RANK_OPTIONS = ("--local_rank", "--local-rank")
IMPORT_RETRY_S = 0.05  # delay before retrying a stop signal that arrived during an import
STATUSES = "Exit status: 0 done, 1 failed, 2 wrong usage"
ERROR_HINTS = {  # errno -> explanation for the user who typed the path, and a fix
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "a file with this name exists; choose another place",
    errno.ENOTDIR: "got a file, expected a folder; choose another place",
    errno.EISDIR: "got a folder, expected a file; choose another name",
    errno.EACCES: "permission denied; choose another place, or ask its owner",
    errno.EROFS: "read-only file system; choose another place",
    errno.ENOSPC: "the disk is full; make room and run the same command again",
}
# file in tools/ -> sub-command, for example pretrain -> scaling train; empty when a file is run by its path
subcommand_names: dict[str, str] = {}


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
    takes_ranks = False

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and keep the arguments for the suggestions of `error`."""
        self.arguments = sys.argv[1:] if args is None else list(args)
        if self.takes_ranks:
            self.arguments = self._strip_local_rank(self.arguments)
        return super().parse_known_args(self.arguments, namespace)

    def _strip_local_rank(self, words: Sequence[str]) -> list[str]:
        """Remove `--local_rank=N`, which the launchers of DeepSpeed and old torch add at any position.

        These launchers also set LOCAL_RANK, which takes precedence. torch before 1.9 sets only the other
        variables, so LOCAL_RANK is then set from the option.
        """
        remaining: list[str] = []
        words = list(words)
        # words after "--" are positional and stay unchanged
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if word == "--" or name not in LOCAL_RANK_OPTIONS:
                remaining += [word, *words] if word == "--" else [word]
                words = [] if word == "--" else words
                continue
            if not equals:
                value = words.pop(0) if words else ""
            if not re.fullmatch(r"-1|[0-9]+", value):
                self.error(f"argument {name}: got '{value}', expected a whole number")
            # -1 is the launchers' value for "not distributed"; setdefault: a variable that the launcher set
            # has precedence
            if "RANK" in os.environ and value != "-1":
                os.environ.setdefault("LOCAL_RANK", value)
        return remaining

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a one-line message, with suggestions for misspelt options."""
        options = {option.lstrip("-"): option for option in self._option_strings_of_all()}
        words = [word.partition("=")[0] for word in self.arguments if word.startswith("--")]
        for word in words:
            # argparse accepts unique prefixes, so a prefix of an option is not misspelt
            if not any(option.startswith(word) for option in options.values()) and (
                nearest := get_close_matches(word.lstrip("-"), options, 1)
            ):
                message += f"; {word}: did you mean {options[nearest[0]]}?"
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _option_strings_of_all(self) -> list[str]:
        """Return the option strings of this parser and of its actions (`register_corpus.py CATALOG add`).

        The parsers of actions delegate their errors to this parser.
        """
        subcommands = [item for item in self._actions if isinstance(item, argparse._SubParsersAction)]
        parsers = [parser for subcommand in subcommands for parser in subcommand.choices.values()]
        return [
            *self._option_string_actions,
            *(option for parser in parsers for option in parser._option_string_actions),
        ]


def create_parser(
    doc: str, may_stop: bool = False, takes_ranks: bool = False, parser_class: type[ToolParser] = ToolParser
) -> argparse.ArgumentParser:
    """Create a parser whose help is a module's docstring: the first paragraph, the options, then the rest.

    The rest begins with example commands that can be pasted.

    may_stop     the command saves its work on a stop signal and exits with status 75
    takes_ranks  a launcher may start the command once for each rank
    """
    head, _, rest = _replace_commands(doc).strip().partition("\n\n")
    stopped = f", {STOPPED} stopped by a signal (run the same command again to resume)" if may_stop else ""
    examples, _, notes = rest.partition("\n\n")
    examples = textwrap.indent(textwrap.dedent(examples), "    ")
    sections = [f"examples:\n{examples}", *([notes] if notes else []), f"{STATUSES}{stopped}."]
    epilog = "\n\n".join(sections)
    parser = parser_class(description=head, epilog=epilog, formatter_class=create_formatter)
    parser.takes_ranks = takes_ranks
    return parser


def _replace_commands(text: str) -> str:
    """Replace `python tools/x.py` by the sub-command where the user has typed one."""
    pattern = re.compile(r"python tools/(\w+)\.py")
    return pattern.sub(lambda match: subcommand_names.get(match[1], match[0]), text)


def add_action(actions: Any, name: str, what: str, example: str) -> argparse.ArgumentParser:
    """Add an action to a command and return its parser. Its help is a description and an example."""
    description = what[0].upper() + what[1:] + "."
    return actions.add_parser(
        name,
        help=what,
        description=description,
        epilog=f"example:\n    {_replace_commands(example)}",
        formatter_class=create_formatter,
    )


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


def install_stop_handlers() -> None:
    """Raise KeyboardInterrupt on SIGTERM, SIGHUP and SIGUSR1 as on Ctrl-C, but never during an import.

    Slurm sends SIGUSR1 before the time limit of a job (--signal in examples_scaling/training/*_slurm.sh).

    Modules compiled by Cython, such as numpy.random, are initialised inside an `except: pass`. An exception
    raised there is lost and the command would continue. A signal that arrives during an import is therefore
    retried by a timer (SIGALRM) until the import has ended.
    """

    def handle_stop_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            replace_lost_terminal()
        if _is_importing(frame):
            # SIGALRM runs this handler again after the delay; the interval 0 means once
            signal.setitimer(signal.ITIMER_REAL, IMPORT_RETRY_S)
        else:
            raise KeyboardInterrupt

    # a shell script starts background jobs (`command &`) with SIGINT ignored, and they must continue to
    # ignore it
    sigint_is_enabled = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    for number in stop_signals(signal.SIGALRM, signal.SIGUSR1):
        if number != signal.SIGINT or sigint_is_enabled:
            signal.signal(number, handle_stop_signal)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether the import machinery is on the call stack of a frame."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def run_main(main: Callable[[], int]) -> NoReturn:
    """Exit the process with the status that `main` returns.

    An OSError, a ValueError and a missing package are printed as one sentence. Ctrl-C and a closed pipe
    (`| head`) print no traceback.
    """
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped; run the same command again", file=sys.stderr)
        status = STOPPED
    except BrokenPipeError:
        # the flush at exit must not raise again
        # The buffer still has text for the closed pipe. Python flushes it at exit, now to /dev/null.
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
    import importlib.metadata  # imported on demand: slow

    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
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


def load_tool(tool: Path) -> ModuleType:
    """Import a file in tools/ as a module, for code that inspects the tools: completion and guide tests."""
    spec = importlib.util.spec_from_file_location(f"tools_{tool.stem}", tool)
    assert spec is not None and spec.loader is not None, "importlib has a loader for .py files"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
