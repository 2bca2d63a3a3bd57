"""Preparation of a mixture for training: its documents as tokens, with the weights of the domains."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import ProgressBar
from megatron.data import open_dataset
from megatron.data.indexed import IndexedTokens
from megatron.io import wait_for_lock, write_json
from megatron.log import get_logger
from megatron.mixture.files import TAR_SUFFIXES, SourceFile, batch_files
from megatron.mixture.query import Selection, documents_path
from megatron.mixture.spec import MixtureSpec, build_step_weights, read_spec
from megatron.plan.datapaths import compare_eods
from megatron.plan.mixture_use import RESOLVED, ResolvedMixture, mixture_folder, read_resolved
from megatron.text.preprocess import PreprocessOptions, preprocess

TOKENS = "tokens"  # folder of the tokenized texts
BATCH_BYTES, BATCH_FILES = 128 << 20, 4096  # limits of adjacent files that become one dataset

log = get_logger(__name__)


def prepare_mixture(path: str | Path, quiet: bool = False, verify: bool = False) -> ResolvedMixture:
    """Query the catalog, tokenize the text, and write the result to the folder beside the file.

    Existing results are reused. Several processes may call this at once; one of
    them does the work. Size and modification time of every file must be those
    of the catalog; with `verify` its content too. Raises what reading, querying
    and tokenizing raise.
    """
    spec = read_spec(path)
    folder = mixture_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    # only one process prepares; the others wait and find the result
    with wait_for_lock(folder / ".lock"):
        selection = spec.select_documents(count_tokens=False)
        for file in selection.files if verify else ():
            file.verify()
        datasets, places = tokenize_files(selection.files, spec, folder, quiet)
        tokenizer = _check_tokenizer(datasets)
        # changes with the documents, the specification, or the tokenizer
        sums = [selection.compute_identity(), spec.compute_sha256(), tokenizer.get("sha256")]
        identity = hashlib.sha256(json.dumps(sums).encode()).hexdigest()
        if not _is_prepared(path, identity):
            located = _locate_tokens(selection, datasets, places)
            ends = np.concatenate([[0], np.cumsum(located.column("size"), dtype=np.int64)])
            tokens = np.diff(ends[located.bounds])
            weights, _ = build_step_weights(spec, selection, tokens, 1)
            located.save(documents_path(path, identity))
            # RESOLVED last: without the documents
            # of its identity it counts as not prepared
            write_json(folder / RESOLVED, {
                "identity": identity,
                "snapshot": dict(selection.snapshot),
                "tokenizer": tokenizer,
                "domains": list(selection.names),
                "documents": selection.n_documents.tolist(),
                "tokens": tokens.tolist(),
                "weights": weights.weights_at(0)[0].tolist(),
                "pairs": [dataset.prefix for dataset in datasets],
            })  # fmt: skip
            # processes that map an earlier file keep it
            for old in set(folder.glob("documents*.arrow")) - {documents_path(path, identity)}:
                old.unlink()
    return read_resolved(path)


def _is_prepared(path: str | Path, identity: str) -> bool:
    """Return whether the files of a prepared mixture have this identity."""
    is_resolved = (mixture_folder(path) / RESOLVED).is_file() and read_resolved(path).identity == identity
    return is_resolved and documents_path(path, identity).is_file()


def _locate_tokens(selection: Selection, datasets: Sequence[IndexedTokens], places: np.ndarray) -> Selection:
    """Return the documents with their dataset in `file`, and first token and length in `begin` and `size`."""
    file, row = selection.column("file"), selection.column("row")
    number = places[file, 0].astype(np.int32)
    begins, sizes = np.empty(len(file), dtype=np.int64), np.empty(len(file), dtype=np.int32)
    for k, dataset in enumerate(datasets):
        mask = np.flatnonzero(number == k)
        begins[mask], sizes[mask] = dataset.document_spans(row[mask] + places[file[mask], 1])
        dataset.unmap()
    documents = selection.documents
    for name, column in (("file", number), ("begin", begins), ("size", sizes)):
        documents = documents.set_column(documents.column_names.index(name), name, [column])
    return replace(selection, documents=documents)


def tokenize_files(
    files: Sequence[SourceFile], spec: MixtureSpec, folder: Path, quiet: bool
) -> tuple[list[IndexedTokens], np.ndarray]:
    """Return the datasets with the documents of the files, and the places of the files, int64 [n, 2].

    A place is the number of the dataset, and of the file's first document there.
    Text is tokenized once, many files at a time.

    Raises ValueError for a file that is not as registered.
    """
    datasets: list[IndexedTokens] = []
    places: list[tuple[int, int]] = []
    n_bytes = sum(file.n_bytes for file in files if not file.is_dataset)
    with ProgressBar("tokenizing", n_bytes, "B", quiet=quiet) as bar:
        for batch in batch_files(files, _describe_file, BATCH_BYTES, BATCH_FILES):
            if batch[0].is_dataset:
                batch[0].check_unchanged()
                prefix = batch[0].prefix
            else:
                prefix = _tokenize_batch(batch, spec, folder)
                bar.update(sum(file.n_bytes for file in batch))
            dataset, counts = open_dataset(prefix), [file.n_documents for file in batch]
            # rows of the catalog and of the dataset must match
            if dataset.n_documents != sum(counts):
                raise ValueError(
                    f"{batch[0].path}: {sum(counts):,} documents are registered, {dataset.n_documents:,} are "
                    f"tokenized, of {len(batch):,} files. Correct the lines that scaling register CATALOG "
                    "broken lists, and register the files again."
                )
            places += [(len(datasets), first) for first in accumulate(counts[:-1], initial=0)]
            datasets.append(dataset)
    return datasets, np.array(places, dtype=np.int64)


def _describe_file(file: SourceFile) -> tuple[int, str]:
    """Return the bytes of a file, and a key that it shares with the texts of one dataset."""
    return file.n_bytes, f"file {file.path}" if file.is_dataset else f"text {file.text_key}"


def _tokenize_batch(batch: Sequence[SourceFile], spec: MixtureSpec, folder: Path) -> str:
    """Return the prefix of the dataset with the documents of some texts."""
    paths, key = [file.check_unchanged() for file in batch], batch[0].text_key
    tokenizer = spec.settings.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{spec.path}: no tokenizer, but {paths[0]} is text. Add tokenizer: gpt2, or a folder."
        )
    # everything that determines the tokens is in the file name, so that old
    # results are not reused
    made_of = [[file.path, file.n_bytes, file.mtime_ns, file.sha256] for file in batch]
    name = hashlib.sha256(json.dumps([made_of, key, tokenizer]).encode()).hexdigest()[:12]
    name = f"{paths[0].name.partition('.')[0]}-{name}"
    prefix = folder / TOKENS / f"{name}_{key}_document"
    # the tokens are renamed last, so that they mark a complete dataset
    if not prefix.with_name(prefix.name + ".bin").is_file():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        inputs = [
            file.unpack(folder) if file.path.endswith(TAR_SUFFIXES) else path
            for file, path in zip(batch, paths, strict=True)
        ]
        options = PreprocessOptions(
            keys=(key,), append_eod=True, skip_bad_lines=True, quiet=True, overwrite=True
        )
        preprocess([str(path) for path in inputs], prefix.with_name(name), tokenizer, options)
    return str(prefix)


def _check_tokenizer(datasets: Sequence[IndexedTokens]) -> dict[str, Any]:
    """Return the tokenizer of the datasets. Raises ValueError if they differ."""
    tokenizer: dict[str, Any] = {}
    for dataset in datasets:
        recorded = (dataset.sidecar or {}).get("tokenizer") or {}
        if tokenizer and recorded.get("sha256") != tokenizer.get("sha256"):
            raise ValueError(
                f"{dataset.prefix}: made with another tokenizer than {datasets[0].prefix}. "
                "Use the same tokenizer for both."
            )
        tokenizer = tokenizer or recorded
    for warning in compare_eods([dataset.prefix for dataset in datasets], allow_mixed=True):
        log.warning("%s", warning)
    return tokenizer
