"""The sharded layout: weights and moments in torch's distributed checkpoint, from all ranks at once."""

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from megatron.checkpoint.dcp_metadata import read_metadata
from megatron.checkpoint.layout import METADATA as METADATA  # the name of the index, for callers too
from megatron.checkpoint.torch_file import check_records, refusal_of, system_error_of

State = dict[str, dict[str, Any]]


class _Reader(FileSystemReader):
    """torch's reader with an index that is read already, and with each chunk looked at before it is read."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        end = sinfo.offset + sinfo.length
        with (
            refusal_of(Path(self.path) / sinfo.relative_path),
            mmap(file.fileno(), end, access=ACCESS_READ) as before_end,
        ):
            # a zip file is read from its end: that of a map up to there is the chunk's
            check_records(before_end, sinfo.length)
        return super()._slice_file(file, sinfo)


class _Files(FileSystem):
    """torch's files, which say what the system said when one cannot be written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode == "rb":
                yield stream
            else:
                with system_error_of(cast(IO[bytes], stream), Path(path)) as watched:
                    yield watched


def _writer(folder: Path) -> FileSystemWriter:
    writer = FileSystemWriter(folder)
    writer.fs = _Files()
    return writer


def flat(state: State) -> dict[str, Tensor]:
    """`model.NAME` and `optim.state.NAME.KIND` of a state as engines give it: the keys in DCP's files."""
    named = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, moments in state["optim"]["state"].items():
        named |= {f"optim.state.{name}.{kind}": tensor for kind, tensor in moments.items()}
    return named


def nested(named: dict[str, Tensor]) -> State:
    """Undo `flat`."""
    state: State = {"model": {}, "optim": {"state": {}}}
    for key, tensor in named.items():
        if key.startswith("model."):
            state["model"][key.removeprefix("model.")] = tensor
        else:
            name, _, kind = key.removeprefix("optim.state.").rpartition(".")
            state["optim"]["state"].setdefault(name, {})[kind] = tensor
    return state


def write(folder: Path, state: State, group: dist.ProcessGroup | None = None) -> None:
    """Write what this rank holds: collective over `group`. OSError on every rank where one cannot write."""
    with _failures_told(folder):
        dcp.save(flat(state), storage_writer=_writer(folder), process_group=group)


def write_soon(folder: Path, state: State, group: dist.ProcessGroup | None) -> Future:
    """The same from a copy taken now, in a thread; `finish` waits for it. `group` must be for this alone."""
    with _failures_told(folder):
        return dcp.async_save(flat(state), storage_writer=_writer(folder), process_group=group)


def finish(folder: Path, writing: Future) -> None:
    """Wait for `write_soon`. OSError as `write`."""
    with _failures_told(folder):
        writing.result()


def read(folder: Path, state: State) -> None:
    """Fill an engine's sharded state, of any layout, from a checkpoint of any other: collective.

    ValueError for a checkpoint of another model.
    """
    named = flat(state)
    metadata = read_metadata(folder)
    held = metadata.state_dict_metadata
    for key, tensor in named.items():
        told = held.get(key)
        if told is None or told.size != tensor.shape:
            found = "nothing" if told is None else f"shape {tuple(told.size)}"
            raise ValueError(f"{folder}: {key}: found {found}, wanted shape {tuple(tensor.shape)}")
    with _failures_told(folder):
        dcp.load(named, storage_reader=_Reader(folder, metadata))


def read_whole(folder: Path) -> State:
    """All of a sharded checkpoint in this process alone, whatever the ranks that wrote it."""
    metadata = read_metadata(folder)
    named = {
        key: torch.zeros(told.size, dtype=told.properties.dtype)
        for key, told in metadata.state_dict_metadata.items()
    }
    with _failures_told(folder):
        dcp.load(named, storage_reader=_Reader(folder, metadata), no_dist=True)
    return nested(named)


@contextmanager
def _failures_told(folder: Path) -> Iterator[None]:
    """DCP's exception, which is no Exception, as OSError; and no word on running without a process group."""
    try:
        # not only here: the word may come from the thread that writes
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0] if error.failures else error
        if isinstance(first, ValueError) and str(folder) in str(first):  # of this module, not torch's
            raise first from error
        if isinstance(first, OSError) and first.errno is not None:
            raise OSError(first.errno, first.strerror, first.filename) from error
        raise OSError(f"{folder}: {str(first).splitlines()[0]}") from error
    except RuntimeError as error:  # torch's writer hides what the system said
        raise OSError(f"{folder}: {str(error).splitlines()[0]}") from error
