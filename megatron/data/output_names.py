"""Names of outputs on a command line, and outputs that are there already."""

import argparse
from pathlib import Path

from megatron.data.indexed_writer import SUFFIXES


def output_prefix(word: str) -> Path:
    """The first part of the names of a dataset's files, for argparse's `type`.

    Raises argparse.ArgumentTypeError, which argparse prints, for the name of a folder: its last slash would
    be dropped, and the files be written beside the folder.
    """
    if not word or word.endswith("/") or word.rpartition("/")[2] in (".", ".."):
        raise argparse.ArgumentTypeError(
            f"got '{word}', expected the first part of a file name. Name the files, too, as in "
            f"'{word.rstrip('/') or '.'}/corpus'."
        )
    return Path(word)


def check_free(*paths: Path) -> None:
    """ValueError where one of the files is there."""
    for path in paths:
        if path.exists():
            raise ValueError(
                f"{path}: is there already, made of other files or with other settings. "
                "Choose another name, or replace it with --overwrite."
            )


def dataset_files(prefix: Path) -> list[Path]:
    """The files of a .bin/.idx dataset."""
    return [prefix.with_name(prefix.name + suffix) for suffix in SUFFIXES]
