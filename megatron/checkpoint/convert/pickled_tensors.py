"""Read tensors and settings from other projects' torch files without running code that the files name.

Such files pickle enums, random states and classes of projects that are not installed. torch's weights-only
reader rejects unknown names, so each of them is first mapped to an inert placeholder class.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.checkpoint.torch_file import load_torch_file, wrap_read_errors


class InertObject:
    """Placeholder for an unknown class: accepts any arguments and state, and ignores them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "InertObject":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_pickled_tensors(path: Path) -> Any:
    """Load tensors, numbers, containers and argparse.Namespace; objects of other classes become inert.

    Raises FileNotFoundError, or ValueError for a file that is not a torch file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with wrap_read_errors(path):
        # lists the names from the opcodes, without
        # resolving or importing any of them
        names = get_unsafe_globals_in_checkpoint(str(path))
        # one placeholder class per name, because
        # the reader looks classes up by identity
        stand_ins: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
            (_make_stand_in(name), name) for name in names
        ]
    # (class, name): the reader maps the name in the file to
    # this class. The names are allowed in this block only.
    with safe_globals(stand_ins):
        return load_torch_file(path, map_file=True)


def _make_stand_in(name: str) -> type:
    if name == "argparse.Namespace":
        return argparse.Namespace
    return type(name.rpartition(".")[2], (InertObject,), {})
