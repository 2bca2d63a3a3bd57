"""Token datasets: .bin/.idx files to batches. `open_dataset` opens every kind of dataset."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.data.indexed import IndexedTokens


def open_dataset(uri: str | Path) -> "IndexedTokens":
    """Open a dataset: the prefix of .bin/.idx files or of a list of parts, or a URL without suffix.

    Raises FileNotFoundError, RemoteError (an OSError), or ValueError if its
    files are inconsistent.
    """
    from megatron.data.indexed import IndexedTokens  # numpy and the C++ helper, which plans do not need

    return IndexedTokens(uri)
