"""What the commands in tools/ have in common: the layout of their help, and what their exit statuses say."""

import argparse
import errno
import importlib.util
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from megatron.processes import replace_lost_terminal, stop_signals

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: run me again
LOCAL_RANK_WORDS = ("--local_rank", "--local-rank")
AGAIN_S = 0.05  # until a wish to stop that came within an import is heard
STATUSES = "Exit status: 0 done, 1 failed, 2 wrong usage"
WHY = {  # what the system's errors mean to who typed the path, and the way out
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "a file is in the way; choose another place",
    errno.ENOTDIR: "a file stands where a folder is wanted; choose another place",
    errno.EISDIR: "a folder, where a file is wanted; choose another name",
    errno.EACCES: "no permission; choose another place, or ask its owner",
    errno.EROFS: "cannot be written to; choose another place",
    errno.ENOSPC: "the disk is full; make room and run the same command again",
}


class Help(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they are written; each option with its default."""

    def _get_help_string(self, action: argparse.Action) -> str:
        told = action.help or ""
        default = action.default
        if default is argparse.SUPPRESS or default is None or default is False or default in ([], (), ""):
            return told
        each = default if isinstance(default, (list, tuple)) else [default]
        shown = " ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in each)
        return f"{told} (default {shown.replace('%', '%%')})".lstrip()


class Parser(argparse.ArgumentParser):
    """One that offers the nearest of its options for a word that is none."""

    given: Sequence[str] = ()
    takes_ranks = False

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As argparse's; the words are kept, for `error` to look at."""
        self.given = sys.argv[1:] if args is None else list(args)
        if self.takes_ranks:
            self.given = self._strip_local_rank(self.given)
        return super().parse_known_args(self.given, namespace)

    def _strip_local_rank(self, words: Sequence[str]) -> list[str]:
        """Remove `--local_rank=N`, which the launchers of DeepSpeed and old torch add somewhere.

        They also set LOCAL_RANK, and that is what counts; torch before 1.9 set the other variables only.
        """
        left: list[str] = []
        words = list(words)
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if word == "--" or name not in LOCAL_RANK_WORDS:
                left += [word, *words] if word == "--" else [word]
                words = [] if word == "--" else words
                continue
            if not equals:
                value = words.pop(0) if words else ""
            if not re.fullmatch(r"-1|[0-9]+", value):
                self.error(f"argument {name}: got '{value}', expected a whole number, as launchers add it")
            if "RANK" in os.environ and value != "-1":
                os.environ.setdefault("LOCAL_RANK", value)
        return left

    def error(self, message: str) -> NoReturn:
        """Say it in one line, with what a misspelt option may have meant."""
        known = {one.lstrip("-"): one for one in self._options()}
        words = [word.partition("=")[0] for word in self.given if word.startswith("--")]
        for word in words:
            if not any(one.startswith(word) for one in known.values()) and (
                nearest := get_close_matches(word.lstrip("-"), known, 1)
            ):
                message += f"; {word}: did you mean {known[nearest[0]]}?"
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help tells more)\n")

    def _options(self) -> list[str]:
        """Its own, and those of its actions (`register_corpus.py CATALOG add`), which leave errors to it."""
        inner = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        parsers = [parser for one in inner for parser in one.choices.values()]
        return [
            *self._option_string_actions,
            *(word for one in parsers for word in one._option_string_actions),
        ]


def command(doc: str, may_stop: bool = False, takes_ranks: bool = False) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring: its first paragraph, the options, then the rest.

    The rest begins with commands that work as pasted. `may_stop`: the command saves its work when it is asked
    to stop, and says so with status 75. `takes_ranks`: a launcher may start it once for each rank.
    """
    head, _, rest = doc.strip().partition("\n\n")
    stopped = f", {STOPPED} stopped when asked to (run the same command again to go on)" if may_stop else ""
    examples, _, notes = rest.partition("\n\n")
    examples = textwrap.indent(textwrap.dedent(examples), "    ")
    told = [f"examples:\n{examples}", *([notes] if notes else []), f"{STATUSES}{stopped}."]
    epilog = "\n\n".join(told)
    parser = Parser(description=head, epilog=epilog, formatter_class=Help)
    parser.takes_ranks = takes_ranks
    return parser


def action(actions: Any, name: str, what: str, example: str) -> argparse.ArgumentParser:
    """A parser for one of a command's actions, with a help of its own: what it does, and an example."""
    description = what[0].upper() + what[1:] + "."
    return actions.add_parser(
        name, help=what, description=description, epilog=f"example:\n    {example}", formatter_class=Help
    )


def count(word: str) -> int:
    """A whole number above 0."""
    return _at_least(1, word)


def whole(word: str) -> int:
    """A whole number, 0 too."""
    return _at_least(0, word)


def _at_least(least: int, word: str) -> int:
    try:
        found = int(word)
    except ValueError:
        found = least - 1
    if found < least:
        raise argparse.ArgumentTypeError(f"found '{word}', wanted a whole number of {least} or more")
    return found


def stop_when_told() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, and none of them within an import.

    Modules that Cython makes are begun with an `except: pass`, numpy.random among them: what is raised there
    is lost, and the command goes on as if nobody had told it to stop.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            replace_lost_terminal()
        if _is_importing(frame):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            raise KeyboardInterrupt

    ctrl_c_is_heard = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    for number in stop_signals(signal.SIGALRM):
        if number != signal.SIGINT or ctrl_c_is_heard:
            signal.signal(number, stop)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with what `main` returns; what went wrong is a sentence, and Ctrl-C and a closed pipe
    (`| head`) leave no trace."""
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped; run the same command again", file=sys.stderr)
        status = STOPPED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush at exit
        status = 1
    except (OSError, ValueError) as error:
        status = failed(error)
    sys.exit(status)


def failed(error: Exception) -> int:
    """Say in one sentence on standard error what went wrong; the exit status."""
    print(f"error: {sentence(error)}", file=sys.stderr)
    return 1


def sentence(error: Exception) -> str:
    """What went wrong. Of an error of the operating system: where, and what that means."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    told = WHY.get(error.errno, error.strerror)
    where = error.filename2 or error.filename  # of a renaming the place, not the file that is still partial
    return f"{str(where).removesuffix('.partial')}: {told}" if where is not None else told


def near(path: Path) -> Path:
    """A path as seen from the working directory, where it lies below that: it can be read and pasted."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def load_tool(tool: Path) -> ModuleType:
    """A file in tools/ as a module, for what describes the tools: completion, and tests of guides."""
    spec = importlib.util.spec_from_file_location(f"tools_{tool.stem}", tool)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
