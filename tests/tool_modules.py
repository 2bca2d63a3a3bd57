"""Files of tools/ as modules, for tests that inspect them or run them in process."""

import importlib.util
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from megatron import cli
from megatron.cli import ACTIONS, DEFAULT_HANDLERS, PROGRAM, SUBCOMMANDS, report_error
from megatron.log import get_logger

TOOLS = Path(__file__).resolve().parents[1] / "tools"


@cache
def load_tool(tool: Path) -> ModuleType:
    """Import a file in tools/ as a module, once. Modules of its folder can be imported, as when it is run."""
    spec = importlib.util.spec_from_file_location(f"tools_{tool.stem}", tool)
    assert spec is not None and spec.loader is not None, "importlib has a loader for .py files"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    if str(tool.parent) not in sys.path:
        sys.path.append(str(tool.parent))
    spec.loader.exec_module(module)
    module.main = report_errors(module.main)
    return module


def report_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Return a function that prints errors and returns 1, as `megatron.cli.run_main` does."""

    @wraps(main)
    def run(*args: Any) -> int:
        try:
            return main(*args)
        except (OSError, ValueError) as error:
            return report_error(error)

    return run


@dataclass(frozen=True)
class CliResult:
    """What a program returned and wrote."""

    status: int
    output: str
    """Standard output, with child processes' output."""
    error: str
    """Standard error."""


Cli = Callable[..., CliResult]


def run_cli(
    *argv: object,
    status: int | None = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> CliResult:
    """Run a program in this process as `scaling ...` or `python tools/x.py ...` would.

    argv    a sub-command (`fit`), a file of tools/ (`fit_law.py`, `bench/fit.py`, a path) or an option of
            `scaling`, then words of any type
    status  the expected exit status; None: any
    env     variables that are set for this run
    An exception that would end a process with a traceback is raised.
    """
    words = [str(word) for word in argv]
    main, sys_argv = _resolve_program(words)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        with _process_state(sys_argv, cwd, env or {}), _redirected(given, out, err):
            try:
                cli.run_main(main)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
        out.seek(0)
        err.seek(0)
        result = CliResult(code, out.read().decode(), err.read().decode())
    assert status is None or result.status == status, f"status {result.status}\n{result.output}{result.error}"
    return result


def _resolve_program(words: list[str]) -> tuple[Callable[[], int], list[str]]:
    """Return the main function of a program and its `sys.argv`."""
    name = words[0] if words else ""
    if name in SUBCOMMANDS:
        action = SUBCOMMANDS[name] in ACTIONS  # argparse takes the program's name from the first word
        sys_argv = [PROGRAM, *words] if action else [f"{PROGRAM} {name}", *words[1:]]
        return load_tool(TOOLS / f"{SUBCOMMANDS[name]}.py").main, sys_argv
    if name.endswith(".py"):
        return load_tool(TOOLS / name).main, [str(TOOLS / name), *words[1:]]
    return cli.main, [PROGRAM, *words]


def _run_in_place(program: str, words: Sequence[str]) -> None:
    """Stand for `os.execv` of Python with a file: run the file, and end with its status."""
    main, sys.argv = _resolve_program(list(words[1:]))
    cli.run_main(main)


@contextmanager
def _process_state(sys_argv: list[str], cwd: Path | None, env: Mapping[str, str]) -> Iterator[None]:
    """Set what a new process would have, and restore afterwards what a program may change."""
    before = Path.cwd()
    handlers = {number: signal.getsignal(number) for number in DEFAULT_HANDLERS}
    with (
        patch.object(sys, "argv", sys_argv),
        patch.object(sys, "path", [*sys.path]),
        patch.dict(os.environ, env),
        patch.object(os, "execv", _run_in_place),
    ):
        try:
            os.chdir(cwd or before)
            yield
        finally:
            os.chdir(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if torch := sys.modules.get("torch"):
                torch.set_num_threads(1)  # as OMP_NUM_THREADS of the tests


@contextmanager
def _redirected(given: Any, out: Any, err: Any) -> Iterator[None]:
    """Redirect the standard streams, also of child processes, and the log, to files."""
    logger = logging.getLogger("megatron")
    saved = [os.dup(number) for number in range(3)]
    with ExitStack() as stack:
        for number, file in enumerate((given, out, err)):
            stack.callback(os.close, saved[number])
            stack.callback(os.dup2, saved[number], number)
            os.dup2(file.fileno(), number)
        # on the numbers and never closed: a library may keep a stream and write to it later
        streams = [os.fdopen(number, "r" if number == 0 else "w", closefd=False) for number in range(3)]
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            stack.enter_context(patch.object(sys, name, stream))
        handlers, logger.handlers = logger.handlers, []
        get_logger()  # its handler writes to the new standard error
        stack.callback(setattr, logger, "handlers", handlers)
        stack.callback(setattr, logger, "level", logger.level)
        stack.callback(lambda: [stream.flush() for stream in streams[1:]])
        yield
