"""Read and write `torch.save` files: no code of an untrusted file runs, and disk errors keep their errno.

`weights_only=True` prevents the execution of pickled code. This module checks
two more things: compressed or overlapping records (zip bombs), and tensors that
are not dense or are larger than their storage.
"""

import argparse
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from mmap import mmap
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals


def load_torch_file(path: Path, *, map_file: bool = False, inert_classes: bool = False) -> Any:
    """Load tensors (on the CPU), numbers and containers from a file, without running code that it names.

    inert_classes   load argparse.Namespace, and objects of other classes
                    as an InertObject, for files of other projects:
                    torch's reader rejects names that it does not know

    Memory use is bounded by the file's size. Raises FileNotFoundError, or
    ValueError for an invalid file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    # the checks are in this order: sizes of records before
    # they are unpacked, tensors before any is copied
    with wrap_read_errors(path):
        with path.open("rb") as file:
            check_records(file, path.stat().st_size)
        # lists the names from the opcodes, without
        # resolving or importing any of them
        names = get_unsafe_globals_in_checkpoint(str(path)) if inert_classes else []
        # (class, name): the reader maps the name in the file to this
        # class, in this block only. It looks classes up by identity, so
        # each name has a class of its own.
        with safe_globals([(_make_stand_in(name), name) for name in names]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=map_file)
        check_tensors(content)
    return content


class InertObject:
    """Placeholder for an unknown class: accepts any arguments and state, and ignores them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "InertObject":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _make_stand_in(name: str) -> Callable[..., Any]:
    if name == "argparse.Namespace":
        return argparse.Namespace
    return type(name.rpartition(".")[2], (InertObject,), {})


@contextmanager
def wrap_read_errors(path: Path) -> Iterator[None]:
    """Convert any error of torch's reader, except OSError, to a ValueError that names the path."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # torch passes on its parser's errors, of any type
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path}: cannot be read as a torch file ({first[:300]})") from error


def check_records(file: IO[bytes] | mmap, n_bytes: int) -> None:
    """Raise ValueError for a zip file that unpacks to more than its size. torch never compresses records."""
    with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
        # The directory may list the same bytes many times: a file of 1 MB
        # with 1,000 overlapping entries would unpack to 1 GB. The sum of the
        # sizes detects this. The compression type detects the usual zip bomb.
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError("got compressed records, expected uncompressed ones as torch writes")
    if sum(record.file_size for record in records) > n_bytes:
        raise ValueError(f"got records larger than the file's {n_bytes:,} bytes")


def check_tensors(content: Any) -> None:
    """Raise ValueError for a tensor in nested containers that is sparse, quantized or exceeds its storage."""
    # Containers may share elements: 40 nested lists of twice the same list
    # are 2^40 paths in one kilobyte. Each object is therefore visited once.
    waiting, seen = [content], set()
    while waiting:
        value = waiting.pop()
        # `content` keeps every object alive, so no id is reused during the walk
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
        raise ValueError(
            f"got a tensor of layout {tensor.layout} on {tensor.device}, expected a dense CPU tensor"
        )
    # An expanded tensor (stride 0) has few bytes of storage
    # but allocates its full size when it is copied.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(f"got a tensor of shape {tuple(tensor.shape)[:8]}, which is larger than its storage")


def save_torch_file(content: Any, path: Path) -> None:
    """Save like `torch.save`, without fsync; replaces a file. Errors are OSError with errno and path."""
    # closing is inside: it writes the last buffer, and its error names no file
    with preserve_os_error(path.open("wb"), path) as watched, closing(watched):
        torch.save(content, watched)


class _WatchedFile:
    """A file that records the OSError of a failed write, which torch's zip writer hides."""

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
def preserve_os_error(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """Yield a wrapper of an open file. A failed write raises OSError with the system's errno and `path`."""
    watched: Any = _WatchedFile(file)
    try:
        yield watched
    # torch reports a failed write as a RuntimeError about
    # the file position, without the cause (disk full)
    except (RuntimeError, OSError) as error:
        cause = watched.error or error
        if not isinstance(cause, OSError) or cause.errno is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
