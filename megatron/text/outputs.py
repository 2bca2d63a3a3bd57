"""Outputs of a job that exist already: complete and from the same job, or of another one."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.data.indexed_writer import DATASET_SUFFIXES
from megatron.text.inputs import Source, open_source
from megatron.text.join import OutputDataset, PreprocessResult, RejectSummary, dataset_prefix, rejects_path


def locate_output(folder: Path | str, name: str) -> Path | str:
    """Return a file or a dataset in a folder, which is local or at a URL without a last slash."""
    return folder / name if isinstance(folder, Path) else f"{folder}/{name}"


def find_output(folder: Path | str, name: str) -> "Source | None":
    """Return a file of an output, None if it is missing."""
    location = locate_output(folder, name)
    if isinstance(location, Path):
        return location if location.is_file() else None
    from megatron.data.remote import RemoteMissingError, find_file

    with suppress(RemoteMissingError):
        return find_file(location)
    return None


def find_finished(
    folder: Path | str, prefix: Path, keys: Sequence[str], job: str | None, may_replace: bool
) -> PreprocessResult | None:
    """Return the outputs and rejects if they exist completely and are from the same job; else None.

    An incomplete output of the same job is written again. Raises
    ValueError if an output of another job exists, unless `may_replace`.
    """
    outputs: list[OutputDataset] = []
    rejected = RejectSummary()
    for name in (dataset_prefix(prefix, key).name for key in keys):
        sidecar = _read_sidecar(folder, name)
        if job is None or sidecar.get("job") != job:
            existing = [
                suffix for suffix in DATASET_SUFFIXES if find_output(folder, name + suffix) is not None
            ]
            if existing and not may_replace:
                raise ValueError(
                    f"{locate_output(folder, name + existing[0])}: exists already, from other files or "
                    "settings. Choose another name, or replace it with --overwrite."
                )
            continue
        if all(find_output(folder, name + suffix) is not None for suffix in DATASET_SUFFIXES):
            counts = [
                sidecar[count] for count in ("documents", "tokens", "empty_documents", "longest_document")
            ]
            outputs.append(OutputDataset(locate_output(folder, name), *counts))
            rejected = RejectSummary(sidecar["rejected_lines"], sidecar["rejected_files"])
    if len(outputs) < len(keys):
        return None
    if not rejected.n_lines and not rejected.n_files:
        return PreprocessResult(outputs, rejected)
    name = rejects_path(prefix).name
    if find_output(folder, name) is None:
        return None
    return PreprocessResult(outputs, replace(rejected, path=locate_output(folder, name)))


def _read_sidecar(folder: Path | str, name: str) -> dict[str, Any]:
    """Return the sidecar of a dataset, empty if it is missing or not one."""
    file = find_output(folder, f"{name}.json")
    if file is not None:
        with suppress(ValueError), open_source(file) as content:
            sidecar = json.load(content)
            return sidecar if isinstance(sidecar, dict) else {}
    return {}
