"""Outputs of preprocessing in object storage: written to a local work folder, then uploaded.

The order of the upload makes a dataset visible completely or not at all: .bin, .idx, rejects, and the sidecar
last. An older dataset is deleted in the opposite order before. A file of a multipart upload appears when the
upload is complete. The versions of uploaded files are recorded in the work folder, so that the same command
resumes a killed upload after the last complete file.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from megatron.data.indexed_writer import DATASET_SUFFIXES
from megatron.data.sidecar import HEADER
from megatron.io import open_exclusive, read_json, write_json
from megatron.log import get_logger
from megatron.remote_files import RemotePath
from megatron.remote_requests import (
    RemoteError,
    RemoteInfo,
    RemoteMissingError,
    check_url,
    connect,
    request_info,
    retry,
)
from megatron.terminal import ProgressBar
from megatron.text.join import OutputDataset, RejectSummary, dataset_prefix, rejects_path
from megatron.text.preprocess import PreprocessOptions, PreprocessResult, preprocess
from megatron.tokenizer.kinds import TokenizerSpec

STORES = ("s3", "gs", "gcs")
PART_BYTES = 64 << 20  # of a multipart upload
MAX_PARTS = 9000  # S3 allows 10,000
STATE_FILE, LOCK_FILE = "uploaded.json", "lock"  # in the work folder

log = get_logger(__name__)


@dataclass(frozen=True)
class RemoteFolder:
    """The folder of the outputs. `url`: without a last slash."""

    url: str
    overwrite: bool

    def name_url(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}"

    def find_finished(
        self, prefix: Path, keys: Sequence[str], job: str | None
    ) -> tuple[list[OutputDataset], RejectSummary] | None:
        """Return (outputs, rejects) if all exist completely and are from the job, as join.find_finished.

        Raises ValueError if an output of another job exists, unless `overwrite`.
        """
        outputs: list[OutputDataset] = []
        n_lines = n_files = 0
        for key in keys:
            name = dataset_prefix(prefix, key).name
            sidecar = self._read_sidecar(name)
            if (
                sidecar is None
                or job is None
                or sidecar.get("job") != job
                or not self._is_whole(name, sidecar)
            ):
                self.check_replaceable(name, job)
                return None
            counts = (
                sidecar[field] for field in ("documents", "tokens", "empty_documents", "longest_document")
            )
            outputs.append(OutputDataset(RemotePath(self.name_url(name)), *counts))
            n_lines, n_files = sidecar["rejected_lines"], sidecar.get("rejected_files", 0)
        rejects = RemotePath(self.name_url(rejects_path(prefix).name)) if n_lines or n_files else None
        return outputs, RejectSummary(n_lines, n_files, rejects)

    def _read_sidecar(self, name: str) -> dict[str, Any] | None:
        path = RemotePath(self.name_url(f"{name}.json"))
        try:
            content = json.loads(path.read_range(0, path.info.size))
        except RemoteMissingError:
            return None
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _is_whole(self, name: str, sidecar: dict[str, Any]) -> bool:
        n, width = sidecar["documents"], np.dtype(sidecar["dtype"]).itemsize
        sizes = {".bin": sidecar["tokens"] * width, ".idx": HEADER.size + 20 * n + 8}
        infos = {suffix: find_info(self.name_url(name + suffix)) for suffix in sizes}
        return all((info := infos[suffix]) is not None and info.size == n for suffix, n in sizes.items())

    def check_replaceable(self, name: str, job: str | None) -> None:
        """Raise ValueError if a dataset of another job exists, unless `overwrite`."""
        # without a sidecar: an upload that was killed, or no output
        sidecar = None if self.overwrite else self._read_sidecar(name)
        if sidecar is not None and (job is None or sidecar.get("job") != job):
            raise ValueError(
                f"{self.name_url(name)}.json: exists already, from other files or settings. "
                "Choose another name, or replace it with --overwrite."
            )


def preprocess_to_store(
    inputs: Sequence[str],
    prefix: RemotePath,
    work: Path,
    tokenizer: TokenizerSpec | str,
    options: PreprocessOptions,
) -> PreprocessResult:
    """Preprocess to the folder `work`, upload the outputs to `<prefix>_<key>_document`, delete them locally.

    A call that has finished before does nothing; one that was killed resumes, also within the upload. The
    folder must have room for the complete outputs. Raises as `preprocess`, and RemoteError.
    """
    check_output_url(prefix.url)
    url, _, name = prefix.url.rpartition("/")
    store = RemoteFolder(url, options.overwrite)
    # each part has its own folder, so that several jobs of a machine can share `work`
    label = name if options.part is None else options.part.add_to(Path(name)).name
    folder = work / f".{label}.upload"
    folder.mkdir(parents=True, exist_ok=True)
    with open_exclusive(folder / LOCK_FILE, folder):
        try:
            result = preprocess(inputs, folder / name, tokenizer, options, store.find_finished)
        except BaseException:
            if [path.name for path in folder.iterdir()] == [LOCK_FILE]:
                shutil.rmtree(folder)  # nothing to resume
            raise
        pending = [output for output in result.outputs if not isinstance(output.prefix, RemotePath)]
        for output in pending:
            # the rejects precede the sidecar: a dataset that is visible has them
            rejects = result.rejects if output is pending[0] else None
            _upload_dataset(store, output.prefix, rejects, folder / STATE_FILE, options.quiet)
        shutil.rmtree(folder)
    outputs = [replace(o, prefix=RemotePath(store.name_url(o.prefix.name))) for o in result.outputs]
    rejected = result.rejected
    if rejected.path is not None:
        rejected = replace(rejected, path=RemotePath(store.name_url(rejected.path.name)))
    return PreprocessResult(outputs, rejected, result.cpu_s)


def check_output_url(url: str) -> None:
    """Raise ValueError for a URL that outputs cannot be written to."""
    check_url(url)
    parts = urlsplit(url)
    if parts.scheme not in STORES or not parts.path.strip("/"):
        raise ValueError(
            f"{url}: got a URL without a bucket and a name of a store, expected "
            f"{' or '.join(f'{scheme}://BUCKET/NAME' for scheme in STORES[:2])} or a local prefix."
        )


def find_info(url: str) -> RemoteInfo | None:
    """Return size and version of a remote file, None if it is missing. Raises RemoteError."""
    try:
        return request_info(url)
    except RemoteMissingError:
        return None


def _upload_dataset(
    store: RemoteFolder, local: Path, rejects: Path | None, state_path: Path, quiet: bool
) -> None:
    """Upload the files of a dataset that are not uploaded already."""
    files = [Path(f"{local}{suffix}") for suffix in DATASET_SUFFIXES]
    if rejects is not None:
        files.insert(len(files) - 1, rejects)
    # the sidecar has the hashes of both other files: a state of other content does not match
    sidecar = json.loads(files[-1].read_text())
    state = read_json(state_path) or {}
    if state.get("sha256") != sidecar["sha256"] or state.get("url") != store.name_url(local.name):
        store.check_replaceable(local.name, sidecar.get("job"))
        state = {"url": store.name_url(local.name), "sha256": sidecar["sha256"], "versions": {}}
        for path in reversed(files):  # of an older dataset; the sidecar first: from then on it is not visible
            delete_remote(store.name_url(path.name))
        write_json(state_path, state)
    with ProgressBar("uploading", sum(path.stat().st_size for path in files), "B", quiet=quiet) as bar:
        for path in files:
            url, size = store.name_url(path.name), path.stat().st_size
            version, info = state["versions"].get(path.name), find_info(url)
            if version is None or info != RemoteInfo(size, version):
                upload_file(path, url, bar)
                state["versions"][path.name] = request_info(url).version
                write_json(state_path, state)
            else:
                bar.update(size)


def upload_file(path: Path, url: str, bar: ProgressBar) -> None:
    """Upload a file, in parts if it is large; it appears when it is complete. Raises RemoteError."""
    from fsspec.callbacks import Callback

    size = path.stat().st_size

    class Progress(Callback):  # type: ignore[misc]  # fsspec has no types
        def relative_update(self, inc: int = 1) -> None:
            bar.update(inc)

    def request() -> None:
        filesystem, remote = connect(url)
        _abort_multipart(filesystem, remote)
        filesystem.put_file(str(path), remote, Progress(), chunksize=max(PART_BYTES, size // MAX_PARTS))

    retry(url, request)
    uploaded = request_info(url)
    if uploaded.size != size:
        raise RemoteError(
            f"{url}: got {uploaded.size:,} bytes after the upload, expected {size:,}. Run it again."
        )


def delete_remote(url: str) -> None:
    """Delete a remote file if it exists. Raises RemoteError."""

    def request() -> None:
        filesystem, remote = connect(url)
        filesystem.rm_file(remote)

    if find_info(url) is not None:
        retry(url, request)


def _abort_multipart(filesystem: Any, remote: str) -> None:
    """Delete the parts of uploads of this file that were killed; S3 keeps them, and their cost."""
    if not hasattr(filesystem, "list_multipart_uploads"):
        return
    bucket, _, key = remote.partition("/")
    for upload in filesystem.list_multipart_uploads(bucket) or ():
        if upload["Key"] == key:
            log.info("%s: deleting the parts of an earlier upload that was not completed", remote)
            filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"])
