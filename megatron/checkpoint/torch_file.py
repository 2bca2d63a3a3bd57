"""Reads and writes files of `torch.save` so that a hostile one runs nothing and a full disk is named.

`weights_only=True` keeps pickled code from running. What it leaves open is checked here: compressed or
overlapping records (a zip bomb), and tensors of another kind or larger than the bytes behind them.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor


def load_torch_file(path: Path, *, map_file: bool = False) -> Any:
    """Tensors on the CPU, numbers and containers of one file; nothing that it names is run.

    Memory is bounded by the file's size. Raises FileNotFoundError, or ValueError for what is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with refusal_of(path):
        with path.open("rb") as file:
            check_records(file, path.stat().st_size)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=map_file)
        check_tensors(content)
    return content


@contextmanager
def refusal_of(path: Path) -> Iterator[None]:
    """ValueError with the path for whatever torch raises on a file it cannot read, or must not."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # torch lets through what its parser stumbles over: any type
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: not a torch file that can be read ({first[:300]})") from error


def check_records(file: IO[bytes] | mmap, n_bytes: int) -> None:
    """ValueError for a zip file that unpacks to more than its own size. torch stores, never compresses."""
    with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("its records are compressed, torch's are not")
    if sum(record.file_size for record in records) > n_bytes:
        raise ValueError(f"its records are larger than its {n_bytes:,} bytes")


def check_tensors(content: Any) -> None:
    """ValueError for a tensor in nested containers that is sparse, quantized or larger than its memory."""
    # containers may share parts: each is looked at once, or 2^40 of them fit into a kilobyte
    waiting, seen = [content], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            _check_tensor(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple, set)):
            waiting.extend(value)


def _check_tensor(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ValueError(f"got a tensor of layout {tensor.layout} on {tensor.device}, expected a dense one")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)[:8]} is larger than its bytes")


def save_torch_file(content: Any, path: Path) -> None:
    """`torch.save` that syncs nothing and replaces a file. OSError with number and path on a full disk."""
    with path.open("wb") as file, system_error_of(file, path) as watched:
        torch.save(content, watched)


class _Watched:
    """A file that remembers why it could not be written: torch's zip writer hides that."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return self.file.write(content)
        except OSError as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@contextmanager
def system_error_of(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """A stand-in for an open file, of which a failed write is OSError with the system's number and `path`."""
    watched: Any = _Watched(file)
    try:
        yield watched
    except (RuntimeError, OSError) as error:
        if watched.error is None:
            raise
        raise OSError(watched.error.errno, watched.error.strerror, str(path)) from error
