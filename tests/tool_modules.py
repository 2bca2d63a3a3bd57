"""Files of tools/ as modules, for tests that inspect them."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megatron.cli import ACTIONS, SUBCOMMANDS, report_error

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def load_tool(tool: Path) -> ModuleType:
    """Import a file in tools/ as a module. Modules of its folder can be imported, as when it is run."""
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


def load_command(name: str) -> SimpleNamespace:
    """Load the file of a sub-command; `main` gets the arguments after the sub-command's name."""
    module = load_tool(TOOLS / f"{SUBCOMMANDS[name]}.py")
    action = [name] if SUBCOMMANDS[name] in ACTIONS else []

    def main(argv: Sequence[str]) -> int:
        return int(module.main([*action, *argv]))

    return SimpleNamespace(main=main, build_parser=module.build_parser)
