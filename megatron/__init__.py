"""Scaling studies of language models, from raw text to a fitted scaling law."""

import importlib
import os
import sys
from types import ModuleType


def find_portions(package: str, entries: list[str]) -> list[str]:
    """Return the folders `megatron/` on a search path that add to this package: megatron-core's.

    NVIDIA's wheel installs `megatron/core` without `megatron/__init__.py`,
    a portion of a namespace package. Python would ignore it beside this regular
    package unless both are in one folder. Another regular package of this name
    (Megatron-DeepSpeed) would mix two programs: raise ImportError.
    """
    portions: list[str] = []
    for entry in entries:
        folder = os.path.realpath(os.path.join(entry, "megatron"))
        if folder in (package, *portions) or not os.path.isdir(folder):
            continue
        if os.path.exists(os.path.join(folder, "laws", "__init__.py")):  # another copy of this project
            continue
        names = _list_modules(folder)
        if shared := sorted(names & (_list_modules(package) | {"__init__"})):
            raise ImportError(
                f"{folder}: got a second package `megatron` with {', '.join(shared[:3])}, expected only "
                f"megatron/core beside {package}. Remove {entry or os.getcwd()} from the search path "
                "(PYTHONPATH), or install each in its own virtual environment."
            )
        if names:
            portions.append(folder)
    return portions


def _list_modules(folder: str) -> set[str]:
    """Return the names of a folder's packages and modules. Leftovers such as `__pycache__` do not count."""
    with os.scandir(folder) as entries:
        return {
            entry.name.removesuffix(".py")
            for entry in entries
            if entry.name.endswith(".py") or os.path.exists(os.path.join(entry.path, "__init__.py"))
        }


def __getattr__(name: str) -> ModuleType:
    """Import the C++ helper at its first use. Raises ImportError with a fix if it was not compiled."""
    if name != "_csrc":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    helper = f"{__name__}.{name}"
    try:
        return importlib.import_module(helper)
    except ModuleNotFoundError:
        raise ImportError(
            f"{helper}: not compiled when this package was installed, expected for text, tokens and models. "
            "Install g++ 10 or newer and Python's C headers, then run "
            "pip install --verbose --force-reinstall --no-deps . in the sources.",
            name=helper,
        ) from None


__path__ += find_portions(os.path.dirname(os.path.realpath(__file__)), sys.path)
