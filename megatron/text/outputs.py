"""Outputs of a job that exist already: complete and from the same job, or of another one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed_writer import DATASET_SUFFIXES
from megatron.data.sidecar import HEADER, read_sidecar
from megatron.text.join import OutputDataset, RejectSummary, dataset_prefix, rejects_path


class OutputFolder:
    """Folder of outputs on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_sidecar(self, name: str) -> dict[str, Any] | None:
        """Return the sidecar of a dataset, None if it is missing or invalid."""
        try:
            return read_sidecar(self.folder / name)
        except (FileNotFoundError, ValueError):
            return None

    def find_size(self, name: str) -> int | None:
        """Return the bytes of a file, None if it is missing."""
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None

    def locate(self, name: str) -> Path | str:
        """Return the path or the URL of a file."""
        return self.folder / name


def find_finished(
    folder: OutputFolder, prefix: Path, keys: Sequence[str], job: str | None, may_replace: bool
) -> tuple[list[OutputDataset], RejectSummary] | None:
    """Return (outputs, rejects) if they exist completely and are from the same job; else None.

    An incomplete output of the same job is written again. Raises ValueError if an output of another job
    exists, unless `may_replace`.
    """
    outputs: list[OutputDataset] = []
    rejected = RejectSummary()
    for name in (dataset_prefix(prefix, key).name for key in keys):
        sidecar = folder.read_sidecar(name)
        if job is None or sidecar is None or sidecar.get("job") != job:
            if not may_replace:
                _refuse_existing(folder, name)
            continue
        n, n_tokens = sidecar["documents"], sidecar["tokens"]
        # int32 length, int64 position and int64 boundary per document, and one boundary more
        sizes = {".bin": n_tokens * np.dtype(sidecar["dtype"]).itemsize, ".idx": HEADER.size + 20 * n + 8}
        if all(folder.find_size(name + suffix) == size for suffix, size in sizes.items()):
            counts = sidecar["empty_documents"], sidecar["longest_document"]
            outputs.append(OutputDataset(folder.locate(name), n, n_tokens, *counts))
            rejected = RejectSummary(sidecar["rejected_lines"], sidecar.get("rejected_files", 0))
    if len(outputs) < len(keys):
        return None
    if not rejected.n_lines and not rejected.n_files:
        return outputs, rejected
    name = rejects_path(prefix).name
    if folder.find_size(name) is None:
        return None
    return outputs, replace(rejected, path=folder.locate(name))


def _refuse_existing(folder: OutputFolder, name: str) -> None:
    for suffix in DATASET_SUFFIXES:
        if folder.find_size(name + suffix) is not None:
            raise ValueError(
                f"{folder.locate(name + suffix)}: exists already, from other files or settings. "
                "Choose another name, or replace it with --overwrite."
            )
