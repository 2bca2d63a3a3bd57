"""Merge .bin/.idx datasets into one, in order, with one block in memory at a time.

The output is written in a hidden folder beside it. Its journal names the inputs, and `progress.json` how many
of them are in the output durably. After a kill the same call resumes with the next one. With `remove`, an
input is deleted only after that, so the disk needs little more than the largest input.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.cli import ProgressBar
from megatron.data.block_hash import BLOCK_BYTES, BlockHash, describe_sums, hash_blocks
from megatron.data.indexed import IndexedTokens, resolve_prefix
from megatron.data.indexed_writer import (
    DATASET_SUFFIXES,
    IdCounts,
    IndexedWriter,
    publish_dataset,
    unigram_entropy,
)
from megatron.data.parts import open_dataset
from megatron.io import PARTIAL, fsync_path, open_exclusive, read_json, write_json
from megatron.log import get_logger
from megatron.plan.idx_header import VERSION
from megatron.plan.sidecar import PARTS_INDEX_SUFFIX, PARTS_SUFFIX, is_dataset_of_parts
from megatron.remote_cache import localize
from megatron.remote_requests import is_url
from megatron.text.arguments import check_not_exists, dataset_files
from megatron.text.merge_inputs import (
    MergeInputs,
    open_inputs,
    read_list,
    resolve_dataset_path,
)
from megatron.text.merged_index import MergedIndex

log = get_logger(__name__)
BLOCK_TOKENS = 1 << 20
LOOKAHEAD_DOCUMENTS = 1 << 12  # maximum documents per block
SYNC_BYTES = 1 << 28  # of tokens that are copied between two entries of the journal, or one input
JOURNAL, PROGRESS, LOCK = "journal.json", "progress.json", ".lock"


@dataclass(frozen=True)
class MergeResult:
    """Counts of the output. `is_new`: whether this call has written it."""

    n_documents: int
    n_tokens: int
    is_new: bool


def merge_datasets(
    prefixes: Sequence[str],
    output: Path,
    mixed_eod: bool = False,
    overwrite: bool = False,
    remove: bool = False,
) -> MergeResult:
    """Write the documents of all datasets, one dataset after another, as one dataset.

    mixed_eod   allow datasets whose documents end differently; the sidecar then has no end token for all
    remove      delete each input as soon as its content is in the output durably

    An existing output from the same datasets stays unchanged. The same call resumes one that was killed.

    Raises FileNotFoundError or ValueError for a dataset that cannot be read. Raises ValueError if tokenizers,
    dtypes or ends of documents differ, if the output is one of the inputs, or if it exists and `overwrite` is
    false; with `remove` also for an input whose tokens do not have the hash of its sidecar.
    """
    if (parts := Path(f"{output}{PARTS_SUFFIX}")).exists():
        raise ValueError(f"{parts}: exists already, a dataset of parts. Choose another name, or delete it.")
    folder = merge_folder(output)
    if (journal := read_unfinished_removal(output)) is not None:
        _check_same_inputs(journal, prefixes, output, remove)
        return _Merge(output, folder, journal).run(overwrite)
    try:
        inputs = open_inputs(prefixes, output, mixed_eod)
    except FileNotFoundError:
        if remove and (finished := find_finished_removal(prefixes, output)) is not None:
            return finished
        raise
    if is_built_from(output, {"merged_from": inputs.meta["merged_from"]}):
        existing = open_dataset(output)
        _delete_folder(folder)  # of a merge that was killed after its last rename
        return MergeResult(existing.n_documents, existing.n_tokens, is_new=False)
    if not overwrite and not (folder / JOURNAL).exists():  # else `run` checks: a kill may have left the .bin
        check_not_exists(*dataset_files(output))
    if remove and any(is_url(dataset.prefix) for dataset in inputs.datasets):
        raise ValueError(f"{output}: got a URL with --remove, which deletes local files only. Omit --remove.")
    if remove and len({resolve_dataset_path(dataset.prefix) for dataset in inputs.datasets}) < len(
        inputs.datasets
    ):
        raise ValueError(f"{output}: got a dataset twice, expected each once with --remove")
    journal = _describe_merge(inputs, prefixes, remove)
    return _Merge(output, folder, journal).run(overwrite)


def merge_folder(output: Path) -> Path:
    """Return the hidden folder of an unfinished merge."""
    return output.with_name(f".{output.name}.merge")


def read_unfinished_removal(output: Path) -> dict[str, Any] | None:
    """Return the journal of an unfinished merge that removes its inputs; None if there is none."""
    journal = read_json(merge_folder(output) / JOURNAL)
    return journal if journal is not None and journal["remove"] else None


def find_finished_removal(
    words: Sequence[str], output: Path, lists: Sequence[Path] = ()
) -> MergeResult | None:
    """Return the counts of a finished merge whose inputs were removed; None if the output is another one.

    It is finished if the words and patterns match the names of all datasets that the output was merged from.
    """
    try:
        dataset = open_dataset(output)
    except (OSError, ValueError):
        return None
    names = [str(origin.get("path")) for origin in (dataset.sidecar or {}).get("merged_from") or []]
    all_words = [*words, *(word for path in lists for word, _ in read_list(path))]
    patterns = [Path(resolve_prefix(word)).name for word in all_words]
    matches = [[name for name in names if fnmatch(name, pattern)] for pattern in patterns]
    if not all(matches) or {name for row in matches for name in row} != set(names):
        return None
    _delete_folder(merge_folder(output))
    return MergeResult(dataset.n_documents, dataset.n_tokens, is_new=False)


def _delete_folder(folder: Path) -> None:
    """Delete the folder of a finished merge, which is not locked, if it exists."""
    # the journal first: without it the folder is no unfinished merge
    for name in (JOURNAL, *(path.name for path in folder.glob("*"))):
        (folder / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        folder.rmdir()


def _describe_merge(inputs: MergeInputs, prefixes: Sequence[str], remove: bool) -> dict[str, Any]:
    """Return the journal of a merge: everything that its restart needs."""
    lists = [
        str(Path(word).absolute()) for word in map(resolve_prefix, prefixes) if is_dataset_of_parts(word)
    ]
    return {
        "remove": remove,
        "dtype": inputs.datasets[0].dtype.str,
        "meta": inputs.meta,
        "lists": lists,
        "inputs": [_describe_input(dataset) for dataset in inputs.datasets],
    }


def _describe_input(dataset: IndexedTokens) -> dict[str, Any]:
    """Return the journal's entry of an input; its version is the time of its .bin, or a hash for a URL."""
    remote = is_url(dataset.prefix)
    return {
        "prefix": dataset.prefix if remote else str(Path(dataset.prefix).absolute()),
        "documents": dataset.n_documents,
        "tokens": dataset.n_tokens,
        "version": Path(localize(dataset.prefix)).parent.name
        if remote
        else Path(f"{dataset.prefix}.bin").stat().st_mtime_ns,
        "sha256": (dataset.sidecar or {}).get("sha256"),
    }


def _check_same_inputs(journal: dict[str, Any], prefixes: Sequence[str], output: Path, remove: bool) -> None:
    """Check that a call names the inputs of an unfinished merge that are left, and no others."""
    n_done = _read_progress(merge_folder(output))["n_done"]
    merged = [resolve_dataset_path(entry["prefix"]) for entry in journal["inputs"]]
    lists = {resolve_dataset_path(prefix) for prefix in journal["lists"]}
    given = {resolve_dataset_path(resolve_prefix(prefix)) for prefix in prefixes} - lists
    if remove and (set(merged[n_done:]) <= given <= set(merged) or not given and lists):
        return
    others = sorted(map(str, given - set(merged))) or ["other options"]
    raise ValueError(
        f"{output}: got {others[0]}, expected the command of its unfinished merge with --remove. Run that "
        f"command first: {merge_folder(output)} has the only copy of {n_done} removed datasets."
    )


def _read_progress(folder: Path) -> dict[str, int]:
    return read_json(folder / PROGRESS) or {"n_done": 0, "n_removed": 0, "n_empty": 0, "longest": 0}


class _Merge:
    """A merge as its journal describes it, from the first input that is not in the output."""

    def __init__(self, output: Path, folder: Path, journal: dict[str, Any]) -> None:
        self.output, self.folder, self.journal = output, folder, journal
        self.inputs = journal["inputs"]
        self.dtype = np.dtype(journal["dtype"])
        self.n_documents = sum(entry["documents"] for entry in self.inputs)
        self.n_tokens = sum(entry["tokens"] for entry in self.inputs)

    def run(self, overwrite: bool) -> MergeResult:
        """Write what is missing of the output, and publish it."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        with open_exclusive(self.folder / LOCK, self.output):
            stored = read_json(self.folder / JOURNAL)
            if stored != json.loads(json.dumps(self.journal)):
                if stored is not None and stored["remove"]:
                    raise ValueError(
                        f"{self.output}: got another unfinished merge. Run its command again first."
                    )
                self._clear_folder()
                write_json(self.folder / JOURNAL, self.journal)
            progress = _read_progress(self.folder)
            is_written = progress["n_done"] == len(self.inputs) and not self._partial_path(".bin").exists()
            try:
                if not is_written:
                    if not overwrite:
                        check_not_exists(*dataset_files(self.output))
                    self._write(progress)
                publish_dataset(self.output, self.folder)
            except ValueError:
                if not (self.journal["remove"] and _read_progress(self.folder)["n_done"]):
                    _delete_folder(self.folder)  # all inputs exist
                raise
            _delete_folder(self.folder)
        return MergeResult(self.n_documents, self.n_tokens, is_new=True)

    def _clear_folder(self) -> None:
        for path in (self.folder / JOURNAL, *self.folder.glob("*")):
            if path.name != LOCK:
                path.unlink(missing_ok=True)

    def _partial_path(self, suffix: str) -> Path:
        return self.folder / (self.output.name + suffix + PARTIAL)

    def _write(self, progress: dict[str, int]) -> None:
        """Copy the inputs from number n_done on, then write the sidecar. All files are partial and synced."""
        n_done = progress["n_done"]
        if self.journal["remove"]:
            for prefix in self.journal["lists"]:  # its parts are the inputs, each a dataset
                for suffix in (PARTS_SUFFIX, PARTS_INDEX_SUFFIX):
                    Path(f"{prefix}{suffix}").unlink(missing_ok=True)
            self._remove_inputs(progress["n_removed"], n_done)
        n_documents = sum(entry["documents"] for entry in self.inputs[:n_done])
        n_tokens = sum(entry["tokens"] for entry in self.inputs[:n_done])
        digest, counts = BlockHash(BLOCK_BYTES), IdCounts()
        index_path, data_path = self._partial_path(".idx"), self._partial_path(".bin")
        self._check_partial(n_done, n_tokens)
        with (
            ProgressBar("merging", self.n_tokens, "tokens") as bar,
            MergedIndex(
                index_path, self.dtype, self.n_documents, progress["n_empty"], progress["longest"]
            ) as index,
            data_path.open("r+b" if data_path.exists() else "w+b") as data,
        ):
            data.truncate(n_tokens * self.dtype.itemsize)
            # the state of a hash is not stored: it is computed again from the data
            while len(ids := np.fromfile(data, self.dtype, BLOCK_TOKENS)):
                digest.update(ids.data)
                counts.add(ids)
                bar.update(len(ids))
            n_pending = 0  # bytes that the journal does not know
            for number, entry in enumerate(self.inputs[n_done:], n_done + 1):
                dataset = _open_input(entry)
                index.add(dataset, n_documents, n_tokens)
                _copy_tokens(dataset, data, (digest, counts), bar.update, check=self.journal["remove"])
                dataset.unmap()
                n_documents, n_tokens = n_documents + dataset.n_documents, n_tokens + dataset.n_tokens
                n_pending += dataset.n_tokens * self.dtype.itemsize
                if n_pending >= SYNC_BYTES or number == len(self.inputs):
                    data.flush()
                    index.flush()
                    for path in (data_path, index_path):
                        fsync_path(path)
                    marks = {"n_done": number, "n_empty": index.n_empty, "longest": index.longest}
                    n_pending, progress = 0, progress | marks
                    write_json(self.folder / PROGRESS, progress)
                    if self.journal["remove"]:
                        self._remove_inputs(progress["n_removed"], number)
                        progress["n_removed"] = number
        sidecar = {
            "format": "MMIDIDX",
            "version": VERSION,
            "dtype": self.dtype.name,
            "documents": self.n_documents,
            "tokens": self.n_tokens,
            "empty_documents": progress["n_empty"],
            "longest_document": progress["longest"],
            "unigram_entropy_nats": None if counts.counts is None else unigram_entropy(counts.counts),
            **self.journal["meta"],
            "sha256": describe_sums(digest, hash_blocks(index_path, BLOCK_BYTES)),
        }
        self._partial_path(".json").write_text(json.dumps(sidecar, indent=1) + "\n")
        fsync_path(self._partial_path(".json"))

    def _check_partial(self, n_done: int, n_tokens: int) -> None:
        """Check that the content of the inputs that are done exists."""
        path, expected = self._partial_path(".bin"), n_tokens * self.dtype.itemsize
        n_bytes = path.stat().st_size if path.is_file() else 0
        if n_bytes < expected or n_done and not self._partial_path(".idx").is_file():
            raise OSError(
                f"{path}: got {n_bytes:,} bytes, expected {expected:,} or more of {n_done} merged datasets. "
                f"Restore it, or delete {self.folder} to start with the datasets that are left."
            )

    def _remove_inputs(self, first: int, end: int) -> None:
        for entry in self.inputs[first:end]:
            for suffix in DATASET_SUFFIXES:
                Path(entry["prefix"] + suffix).unlink(missing_ok=True)


def _open_input(entry: dict[str, Any]) -> IndexedTokens:
    """Open an input again. Raises ValueError if it has changed since the journal was written."""
    dataset = open_dataset(entry["prefix"])
    if _describe_input(dataset) != entry:
        raise ValueError(f"{entry['prefix']}: has changed during the merge. Merge from the beginning.")
    return dataset


def _copy_tokens(
    dataset: IndexedTokens,
    data: IO[bytes],
    sums: tuple[BlockHash, IdCounts],
    advance: Callable[[int], object],
    check: bool,
) -> None:
    """Append the tokens of a dataset to an open file, to a hash and to the counts of ids.

    Raises ValueError if `check` is set and the tokens do not have the hash that the sidecar records.
    """
    recorded = (dataset.sidecar or {}).get("sha256") or {}
    digest = BlockHash(recorded.get("block_bytes")) if check and "bin" in recorded else None
    for begin in range(0, dataset.n_tokens, BLOCK_TOKENS):
        ids = dataset.read_copy(begin, BLOCK_TOKENS)
        data.write(ids.data)
        sums[0].update(ids.data)
        sums[1].add(ids)
        if digest is not None:
            digest.update(ids.data)
        advance(len(ids))
    if digest is not None and digest.hexdigest() != recorded["bin"]:
        raise ValueError(
            f"{dataset.prefix}.bin: its hash differs from the sidecar's, so it is not removed. "
            "Tokenise it again, or merge without --remove."
        )


def is_built_from(output: Path, meta: dict[str, Any]) -> bool:
    """Return whether a complete dataset exists whose sidecar has the entries `meta` with hashes."""
    try:
        sidecar = open_dataset(output).sidecar or {}
    except (OSError, ValueError):
        return False
    content = json.loads(json.dumps(meta))  # as it would be read back: tuples become lists
    origins = content.get("merged_from") or [content.get("subset_of")]
    # Names and counts alone would also match another dataset of the same size. Without hashes the output
    # counts as another dataset.
    return all(origin and origin["sha256"] for origin in origins) and content.items() <= sidecar.items()


def copy_documents(
    dataset: IndexedTokens,
    documents: np.ndarray,
    writer: IndexedWriter,
    advance: Callable[[int], object] = lambda n_tokens: None,
) -> None:
    """Copy documents, int64 ascending, of a dataset; call `advance` with the tokens of each block."""
    begin = 0
    while begin < len(documents):
        # At most LOOKAHEAD_DOCUMENTS, not all that remain: the cumulative sum over the rest, repeated for
        # each block, would be quadratic.
        begins, lengths = dataset.document_spans(documents[begin : begin + LOOKAHEAD_DOCUMENTS])
        sizes = np.cumsum(lengths)
        # as many documents as fit into BLOCK_TOKENS, and at least one
        n = max(1, int(np.searchsorted(sizes, BLOCK_TOKENS, side="right")))
        part, total = documents[begin : begin + n], int(sizes[n - 1])
        if not total:
            ids = np.empty(0, dataset.dtype)
        elif part[-1] - part[0] == n - 1:  # consecutive: a single read, no gather
            ids = dataset.read_copy(int(begins[0]), total)
        else:
            # scattered documents, as of a sample: through the memory map, one copy per document
            ids = np.concatenate([dataset.get_document(i) for i in part.tolist()])
        writer.add_documents(ids, lengths[:n])
        advance(total)
        begin += n
