"""Outputs of preprocessing in object storage: written to a local work folder, then uploaded.

The order of the upload makes a dataset visible completely or not at all: .bin,
.idx, rejects, and the sidecar last. An older dataset is deleted in the opposite
order before. A file of a multipart upload appears when the upload is complete. A
killed upload is repeated by the same command: the complete outputs in the work
folder show that the store was checked before.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from megatron.cli import ProgressBar
from megatron.data.indexed_writer import DATASET_SUFFIXES
from megatron.data.remote import check_url, redact, remove_file, upload_file
from megatron.io import open_exclusive
from megatron.text.inputs import REJECTS_SUFFIX
from megatron.text.join import PreprocessResult, dataset_prefix
from megatron.text.preprocess import PreprocessOptions, preprocess
from megatron.tokenizer.kinds import TokenizerSpec

STORES = ("s3", "gs", "gcs")
LOCK_FILE = "lock"  # in the work folder


def preprocess_to_store(
    inputs: Sequence[str], prefix: str, work: Path, tokenizer: TokenizerSpec | str, options: PreprocessOptions
) -> PreprocessResult:
    """Preprocess to the folder `work`, upload the outputs to `<prefix>_<key>_document`, delete them locally.

    A call that has finished before does nothing; one that was killed resumes, and
    repeats the upload. The folder must have room for the complete outputs. Raises
    as `preprocess`, and RemoteError.
    """
    check_output_url(prefix)
    store, _, name = prefix.rpartition("/")
    # each part has its own folder, so that
    # several jobs of a machine can share `work`
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
            _upload_outputs(store, folder / label.name, result, options)
        shutil.rmtree(folder)
    outputs = [replace(o, prefix=f"{store}/{str(o.prefix).rpartition('/')[2]}") for o in result.outputs]
    rejected = result.rejected
    if rejected.path is not None:
        rejected = replace(rejected, path=f"{store}/{label.name}{REJECTS_SUFFIX}")
    return PreprocessResult(outputs, rejected)


def check_output_url(url: str) -> None:
    """Raise ValueError for a URL that outputs cannot be written to."""
    check_url(url)
    parts = urlsplit(url)
    if parts.scheme not in STORES or not parts.path.strip("/") or url.endswith("/"):
        raise ValueError(
            f"{redact(url)}: got a URL without a bucket and a name of a store, expected "
            f"{' or '.join(f'{scheme}://BUCKET/NAME' for scheme in STORES[:2])} or a local prefix."
        )


def _upload_outputs(store: str, prefix: Path, result: PreprocessResult, options: PreprocessOptions) -> None:
    """Upload the files of the outputs, the sidecars last. An older dataset is deleted before."""
    prefixes = [dataset_prefix(prefix, key) for key in options.keys]
    files = [Path(f"{local}{suffix}") for suffix in DATASET_SUFFIXES[:2] for local in prefixes]
    files += [] if result.rejected.path is None else [Path(result.rejected.path)]
    files += [Path(f"{local}{DATASET_SUFFIXES[2]}") for local in prefixes]
    for path in reversed(files):  # the sidecars first: from then on no dataset is visible
        remove_file(f"{store}/{path.name}")
    total = sum(path.stat().st_size for path in files)
    with ProgressBar("uploading", total, "B", quiet=options.quiet) as bar:
        for path in files:
            upload_file(path, f"{store}/{path.name}", bar.update)
