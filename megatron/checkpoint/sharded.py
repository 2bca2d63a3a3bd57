"""The sharded layout: all ranks write weights and moments as safetensors, through torch's DCP."""

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from megatron.checkpoint.torch_file import preserve_os_error

DcpState = dict[str, dict[str, Any]]


class _FileSystem(FileSystem):
    """torch's file system, but write errors keep the errno of the operating system."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode == "rb":
                yield stream
            else:
                with preserve_os_error(cast(IO[bytes], stream), Path(path)) as watched:
                    yield watched


def _make_writer(folder: Path) -> HuggingFaceStorageWriter:
    # every rank writes one file, shard-RANK-model-00001-of-00001.safetensors
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    writer.fs = _FileSystem()
    return writer


def flatten_state(state: DcpState) -> dict[str, Tensor]:
    """Return an engine's state under the keys of DCP files: `model.NAME`, `optim.state.NAME.KIND`."""
    named = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, moments in state["optim"]["state"].items():
        named |= {f"optim.state.{name}.{kind}": tensor for kind, tensor in moments.items()}
    return named


def unflatten_state(named: dict[str, Tensor]) -> DcpState:
    """Invert `flatten_state`."""
    state: DcpState = {"model": {}, "optim": {"state": {}}}
    for key, tensor in named.items():
        if key.startswith("model."):
            state["model"][key.removeprefix("model.")] = tensor
        else:
            # names have dots: "optim.state.blocks.0.mlp.up.weight.exp_avg"
            # is the kind exp_avg of blocks.0.mlp.up.weight
            name, _, kind = key.removeprefix("optim.state.").rpartition(".")
            state["optim"]["state"].setdefault(name, {})[kind] = tensor
    return state


def write_sharded(folder: Path, state: DcpState, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's shards; collective over `group`. Raises OSError on all ranks if one fails."""
    with _translate_errors(folder):
        save(flatten_state(state), storage_writer=_make_writer(folder), process_group=group)


def write_sharded_async(folder: Path, state: DcpState, group: dist.ProcessGroup | None) -> Future[Any]:
    """Copy the state now and write it in a thread; `wait_for_write` waits for it.

    `group` must not be used for anything else meanwhile.
    """
    with _translate_errors(folder):
        writing = async_save(flatten_state(state), storage_writer=_make_writer(folder), process_group=group)
    assert isinstance(writing, Future), "AsyncSaveResponse is returned with a stager only"
    return writing


def wait_for_write(folder: Path, writing: Future[Any]) -> None:
    """Wait for `write_sharded_async`. Errors as in `write_sharded`."""
    with _translate_errors(folder):
        writing.result()


def read_sharded(folder: Path, state: DcpState) -> None:
    """Load a checkpoint into an engine's sharded state; collective. Both may have different rank layouts.

    Raises ValueError for a checkpoint of another model.
    """
    named = flatten_state(state)
    entries = _list_tensors(folder)
    for key, tensor in named.items():
        entry = entries.get(key)
        if entry is None or entry.size != tensor.shape:
            got = "nothing" if entry is None else f"shape {tuple(entry.size)}"
            raise ValueError(f"{folder}: {key}: got {got}, expected shape {tuple(tensor.shape)}")
    with _translate_errors(folder):
        load(named, storage_reader=HuggingFaceStorageReader(str(folder)))


def read_all_shards(folder: Path) -> DcpState:
    """Load a whole sharded checkpoint in this process, for any number of ranks that wrote it."""
    named = {
        key: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for key, entry in _list_tensors(folder).items()
    }
    with _translate_errors(folder):
        load(named, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return unflatten_state(named)


def _list_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the shape and chunks of each tensor. Raises ValueError for damaged files."""
    try:
        entries: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        for key, entry in entries.items():
            n_stored = sum(prod(chunk.sizes) for chunk in entry.chunks)
            # torch derives the size from the last chunk, so
            # a missing one in the middle would be a hole
            if n_stored != prod(entry.size):
                raise ValueError(f"{key}: got {n_stored} elements in chunks, expected {prod(entry.size)}")
    except (SafetensorError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(
            f"{folder}: cannot be read ({str(error)[:300]}); the checkpoint is damaged"
        ) from error
    return entries


@contextmanager
def _translate_errors(folder: Path) -> Iterator[None]:
    """Convert DCP's errors to OSError, and silence its warning about a missing process group.

    `CheckpointException` derives from BaseException, so callers' `except
    Exception` would miss it.
    """
    try:
        # a global filter, because the writer thread
        # may emit the warning after this block
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0] if error.failures else error
        if isinstance(first, ValueError) and str(folder) in str(first):  # raised by this module, not by torch
            raise first from error
        # error.failures: rank -> (exception, traceback); the first one is reported
        if isinstance(first, OSError) and first.errno is not None:
            raise OSError(first.errno, first.strerror, first.filename) from error
        raise OSError(f"{folder}: {str(first).splitlines()[0]}") from error
    except RuntimeError as error:  # torch's writer hides the system's error
        raise OSError(f"{folder}: {str(error).splitlines()[0]}") from error
