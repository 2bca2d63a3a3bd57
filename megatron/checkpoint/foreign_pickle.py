"""Tensors and settings out of other projects' torch files, without running anything that the files name.

Such files pickle enums, random states and classes of projects that are not installed. torch's weights-only
reader refuses all it does not know; here each unknown name is first given an inert stand-in.
"""

import argparse
from pathlib import Path
from typing import Any

from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron.checkpoint.torch_file import load_torch_file, refusal_of


class Inert:
    """Takes whatever a class would be made of, and does nothing with it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_foreign(path: Path) -> Any:
    """What a torch file holds: tensors, numbers, containers, argparse's Namespace; all else is inert.

    Raises FileNotFoundError, or ValueError for a file that is none of torch's.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with refusal_of(path):
        names = get_unsafe_globals_in_checkpoint(str(path))
        # one class for each name: the reader looks classes up by identity
        stand_ins = [(_stand_in(name), name) for name in names]
    with safe_globals(stand_ins):
        return load_torch_file(path, map_file=True)


def _stand_in(name: str) -> type:
    return argparse.Namespace if name == "argparse.Namespace" else type(name.rpartition(".")[2], (Inert,), {})
