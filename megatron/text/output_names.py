"""Names of outputs on a command line, and checks for existing outputs."""

import argparse
from pathlib import Path

from megatron.data.indexed_writer import DATASET_SUFFIXES


def parse_output_prefix(word: str) -> Path:
    """Parse the prefix of a dataset's file names, for argparse's `type`.

    Raises argparse.ArgumentTypeError, which argparse prints, for the name of a folder: Path would drop the
    last slash, and the files would be written beside the folder.
    """
    if not word or word.endswith("/") or word.rpartition("/")[2] in (".", ".."):
        raise argparse.ArgumentTypeError(
            f"got '{word}', expected the first part of a file name. Add a file name, as in "
            f"'{word.rstrip('/') or '.'}/corpus'."
        )
    return Path(word)


def check_not_exists(*paths: Path) -> None:
    """Raise ValueError if one of the files exists."""
    for path in paths:
        if path.exists():
            raise ValueError(
                f"{path}: exists already, from other files or settings. "
                "Choose another name, or replace it with --overwrite."
            )


def dataset_files(prefix: Path) -> list[Path]:
    """Return the paths of the files of a .bin/.idx dataset."""
    return [prefix.with_name(prefix.name + suffix) for suffix in DATASET_SUFFIXES]
