"""Outputs of preprocessing in object storage: written to a local work folder, then uploaded.

The order of the upload makes a dataset visible completely or not at all: .bin, .idx, rejects, and the sidecar
last. An older dataset is deleted in the opposite order before. A file of a multipart upload appears when the
upload is complete. The versions of uploaded files are recorded in the work folder, so that the same command
resumes a killed upload after the last complete file.
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron.cli import ProgressBar
from megatron.data.indexed_writer import DATASET_SUFFIXES
from megatron.data.remote import (
    RemoteFile,
    RemoteMissingError,
    check_url,
    find_file,
    open_remote,
    redact,
    remove_file,
    upload_file,
)
from megatron.io import open_exclusive, read_json, write_json
from megatron.text.outputs import OutputFolder, check_replaceable
from megatron.text.preprocess import PreprocessOptions, PreprocessResult, preprocess
from megatron.tokenizer.kinds import TokenizerSpec

STORES = ("s3", "gs", "gcs")
STATE_FILE, LOCK_FILE = "uploaded.json", "lock"  # in the work folder


class StoreFolder(OutputFolder):
    """Folder of outputs in a store. `url`: without a last slash."""

    def __init__(self, url: str) -> None:
        self.url = url

    def locate(self, name: str) -> str:
        return f"{self.url}/{name}"

    def find(self, name: str) -> RemoteFile | None:
        """Return size and version of a file, None if it is missing. Raises RemoteError."""
        try:
            return find_file(self.locate(name))
        except RemoteMissingError:
            return None

    def find_size(self, name: str) -> int | None:
        file = self.find(name)
        return None if file is None else file.size

    def read_sidecar(self, name: str) -> dict[str, Any] | None:
        if (file := self.find(f"{name}.json")) is None:
            return None
        with open_remote(file) as content, suppress(ValueError):
            sidecar = json.load(content)
            return sidecar if isinstance(sidecar, dict) else None
        return None


def preprocess_to_store(
    inputs: Sequence[str], prefix: str, work: Path, tokenizer: TokenizerSpec | str, options: PreprocessOptions
) -> PreprocessResult:
    """Preprocess to the folder `work`, upload the outputs to `<prefix>_<key>_document`, delete them locally.

    A call that has finished before does nothing; one that was killed resumes, also within the upload. The
    folder must have room for the complete outputs. Raises as `preprocess`, and RemoteError.
    """
    check_output_url(prefix)
    url, _, name = prefix.rpartition("/")
    store = StoreFolder(url)
    # each part has its own folder, so that several jobs of a machine can share `work`
    label = Path(name) if options.part is None else options.part.add_to(Path(name))
    folder = work / f".{label.name}.upload"
    folder.mkdir(parents=True, exist_ok=True)
    with open_exclusive(folder / LOCK_FILE, folder):
        try:
            result = preprocess(inputs, folder / name, tokenizer, options, store)
        except BaseException:
            if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
                shutil.rmtree(folder)  # nothing to resume
            raise
        if any(isinstance(output.prefix, Path) for output in result.outputs):
            _upload_outputs(store, folder / label.name, result, folder / STATE_FILE, options)
        shutil.rmtree(folder)
    outputs = [replace(o, prefix=store.locate(str(o.prefix).rpartition("/")[2])) for o in result.outputs]
    rejected = result.rejected
    if rejected.path is not None:
        rejected = replace(rejected, path=store.locate(str(rejected.path).rpartition("/")[2]))
    return PreprocessResult(outputs, rejected, result.cpu_s)


def check_output_url(url: str) -> None:
    """Raise ValueError for a URL that outputs cannot be written to."""
    check_url(url)
    parts = urlsplit(url)
    if parts.scheme not in STORES or not parts.path.strip("/") or url.endswith("/"):
        raise ValueError(
            f"{redact(url)}: got a URL without a bucket and a name of a store, expected "
            f"{' or '.join(f'{scheme}://BUCKET/NAME' for scheme in STORES[:2])} or a local prefix."
        )


def _upload_outputs(
    store: StoreFolder, prefix: Path, result: PreprocessResult, state_path: Path, options: PreprocessOptions
) -> None:
    """Upload the files of the outputs that are not uploaded already, the sidecars last."""
    prefixes = [Path(output.prefix) for output in result.outputs]
    files = [Path(f"{local}{suffix}") for suffix in DATASET_SUFFIXES[:2] for local in prefixes]
    files += [] if result.rejected.path is None else [Path(result.rejected.path)]
    files += [Path(f"{local}{DATASET_SUFFIXES[2]}") for local in prefixes]
    # the sidecars have the hashes of the other files: a state of other content does not match
    sums = [json.loads(path.read_text())["sha256"] for path in files[-len(prefixes) :]]
    state = read_json(state_path) or {}
    if state.get("sha256") != sums or state.get("url") != store.url:
        if not options.overwrite:
            job = json.loads(files[-1].read_text())["job"]
            check_replaceable(store, prefix, options.keys, job)
        state = {"url": store.url, "sha256": sums, "files": {}}
        for path in reversed(files):  # of older datasets; the sidecars first: from then on none is visible
            remove_file(store.locate(path.name))
        write_json(state_path, state)
    total = sum(path.stat().st_size for path in files)
    with ProgressBar("uploading", total, "B", quiet=options.quiet) as bar:
        for path in files:
            file = store.find(path.name)
            if file is not None and asdict(file) == state["files"].get(path.name):
                bar.update(file.size)
            else:
                state["files"][path.name] = asdict(upload_file(path, store.locate(path.name), bar.update))
                write_json(state_path, state)
