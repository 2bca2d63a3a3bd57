"""Chunks of whole documents, read from the registered files.

Documents are JSON lines, rows of parquet, or samples of tar archives.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.mixture.distributor import ChunkUnits, Distributor, Position
from megatron.mixture.files import (
    Pool,
    SourceFile,
    connect_database,
    explain_errors,
    import_duckdb,
    import_pyarrow,
)
from megatron.mixture.learner import RUN_NAME, Learner
from megatron.mixture.properties import json_path
from megatron.mixture.records import replace_lone_surrogates
from megatron.mixture.spec import build_chunk_weights, open_selection, read_spec
from megatron.plan.mixture_use import mixture_folder
from megatron.text.inputs import PLAIN_SUFFIXES

MAX_FILES = 512  # open at a time; the usual limit per process is 1,024
PIECE_BYTES = 1 << 22  # a server's answer is in memory in such pieces
ROW_BYTES = 512  # per row, besides its text


class DocumentChunks(AbstractContextManager["DocumentChunks"]):
    """The documents of the chunks of a mixture. Safe to use from several threads.

    Compressed files are unpacked once into the mixture's folder, for random
    access. Weights that follow a model belong to one run, whose log is in
    that folder too.

    counts     documents of each domain, int64 [K]
    at_once    chunks that one call may read without waiting; 1 if the next
               chunk may need losses
    """

    def __init__(
        self, path: str | Path, seed: int = 0, chunk_size: int | None = None,
        run: str | None = "main", roots: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """Open the documents.

        chunk_size   documents per chunk; default: as in the mixture
        run          run whose losses adaptive weights follow; None: of no run
        roots        folders that must contain all files; empty: anywhere

        Raises what reading and querying raise, and ValueError for a file
        outside of the roots, for a run whose name cannot be a file name, and for a
        log that another process has locked.
        """
        self.spec = read_spec(path)
        self.selection = open_selection(self.spec)
        for file in self.selection.files:
            _check_place(file, roots)
            file.check_unchanged()
        self.names, self.identity = self.selection.names, self.selection.compute_identity()
        self.seed, self.chunk_size = seed, chunk_size or self.spec.settings.chunk_size
        self.counts = self.selection.n_documents
        self.at_once = 16 if self.spec.settings.adaptive is None else 1
        self._columns = {name: self.selection.column(name) for name in ("file", "begin", "size")}
        self._files = OpenFiles(self.selection.files, mixture_folder(path))
        self._open_distributor(run)

    def _open_distributor(self, run: str | None) -> None:
        settings = self.spec.settings
        weights, rule = build_chunk_weights(self.spec, self.selection)
        self.distributor = Distributor(
            self.counts, self.names, weights, self.chunk_size, self.seed, settings.dry, settings.shuffle
        )
        self.learner: Learner | None = None
        if rule is None or settings.adaptive is None or run is None:
            return
        # the name of a client becomes a file name: no slash and no leading dot
        if not RUN_NAME.fullmatch(run):
            raise ValueError("run: expected a name of letters, digits, _ . and -, at most 64.")
        # all that determines the order besides
        # the log; Learner rejects another head
        head: dict[str, Any] = {"log_of": self.identity, "spec": self.spec.compute_sha256(), "run": run}
        head |= {"seed": self.seed, "chunk_size": self.chunk_size}
        path = mixture_folder(self.spec.path) / "logs" / f"{run}.jsonl"
        adaptive = settings.adaptive
        self.learner = Learner(path, head, rule, self.distributor, adaptive.every_steps, adaptive.delay_steps)

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report losses, as `ChunkSource`."""
        return self.learner is not None and self.learner.report(chunk, nats, tokens)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the run's log, and the files, which the next read opens again."""
        if self.learner is not None:
            self.learner.close()
        self._files.close()

    def find_position(self, chunk: int, position: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the position before a chunk, ready for JSON, computed from an earlier one."""
        return self.distributor.find_position(chunk, self._read_position(position)).as_dict()

    def read(self, first: int, n_chunks: int, position: dict[str, Any] | None = None) -> Any:
        """Return chunks first, first + 1, ... as Arrow: domain int32, and text.

        position   of an earlier chunk, from which these are computed; None: the start

        There are fewer rows if the data end. Raises NotReadyError (a ValueError) for chunks
        whose weights follow from losses that are not reported yet.
        """
        return self._read_units(self._schedule(first, n_chunks, position))

    def read_pieces(self, first: int, n_chunks: int, position: dict[str, Any] | None = None) -> Iterator[Any]:
        """Yield the rows of `read` in tables of about PIECE_BYTES, at least one."""
        units = self._schedule(first, n_chunks, position)
        # rows of parquet have no sizes: an estimate by their number
        ends = np.cumsum(self._columns["size"][self._find_places(units)] + ROW_BYTES, dtype=np.int64)
        begin = 0
        while not begin or begin < len(units.domain):
            limit = PIECE_BYTES + (int(ends[begin - 1]) if begin else 0)
            end = max(begin + 1, int(np.searchsorted(ends, limit, side="right")))
            yield self._read_units(ChunkUnits(units.domain[begin:end], units.number[begin:end]))
            begin = end

    def _schedule(self, first: int, n: int, position: dict[str, Any] | None) -> ChunkUnits:
        return self.distributor.schedule_chunks(first, n, self._read_position(position))

    def _find_places(self, units: ChunkUnits) -> np.ndarray:
        # documents of all domains in one numbering; domains of 10, 4 and 2
        # documents: bounds 0, 10, 14, 16
        return self.selection.bounds[units.domain] + self.distributor.orders.lookup_units(units)

    def _read_position(self, position: dict[str, Any] | None) -> Position | None:
        return None if position is None else self.distributor.check_position(Position.from_dict(position))

    def _read_units(self, units: ChunkUnits) -> Any:
        """Return the table of `read` for some units."""
        arrow, places = import_pyarrow(), self._find_places(units)
        columns = {name: column[places] for name, column in self._columns.items()}
        # group the documents by file, read each file once, and restore the
        # order of the chunk with `back`
        order = np.argsort(columns["file"], kind="stable")
        texts = self._files.read(*(column[order] for column in columns.values()))
        back = np.empty(len(order), dtype=np.int64)
        # inverse permutation, for file [2, 0,
        # 1]: order [1, 2, 0], back [2, 0, 1]
        back[order] = np.arange(len(order))
        return arrow.table({"domain": units.domain, "text": texts.take(arrow.array(back))})


def _check_place(file: SourceFile, roots: Sequence[Path]) -> None:
    """Raise ValueError for a file outside of all roots, and for a symbolic link in its place."""
    path = Path(file.path)
    # a registered path is resolved: another result means that a part of it was
    # replaced by a link
    if path.resolve() != path or roots and not any(path.is_relative_to(root.resolve()) for root in roots):
        where = ", ".join(map(str, roots)) or "its registered place"
        raise ValueError(f"{path}: is not below {where}. Allow its folder, or register again.")


def _stat_descriptor(descriptor: int) -> tuple[int, int]:
    """Return (bytes, modification time) of an open file; its path may name another one by now."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


class OpenFiles:
    """Readers of the documents of files, at most MAX_FILES of them open.

    Texts are read with pread, not mapped: access to a mapped page of a file
    that was truncated ends the process.
    """

    def __init__(self, files: Sequence[SourceFile], folder: Path) -> None:
        self.files, self.folder = files, folder
        self._lock = threading.RLock()
        self._descriptors = Pool(MAX_FILES, lambda opened: os.close(opened[0]))
        self._scratch = connect_database(1)
        for file in filter(lambda file: file.is_dataset, files):
            raise ValueError(
                f"{file.path}: got a .bin/.idx dataset, expected text for chunks of documents. "
                "Train on it with dataset.mixture or TitanLoader."
            )

    def close(self) -> None:
        """Close all files. A later read opens them again."""
        with self._lock:
            self._descriptors.clear()

    def read(self, file: np.ndarray, begin: np.ndarray, size: np.ndarray) -> Any:
        """Return the documents at these places, sorted by file, as an Arrow array.

        Lines of all files are parsed together. Raises ValueError for a file that has
        changed or cannot be read.
        """
        arrow, parts = import_pyarrow(), []
        cuts = [0, *(np.flatnonzero(np.diff(file)) + 1).tolist(), len(file)] if len(file) else [0]
        spans = list(zip(file[cuts[:-1]].tolist(), map(slice, cuts[:-1], cuts[1:]), strict=True))
        # without the newline, which the last line of a file may not have
        sizes = size.astype(np.int64) - 1
        # the caches and the database are shared; another thread must not close
        # a file in use
        with self._lock:
            # adjacent files with a common key
            for key, group in groupby(spans, key=lambda span: self.files[span[0]].text_key):
                places = list(group)
                content = b"".join(self._read_bytes(k, begin[span], sizes[span]) for k, span in places)
                of_group = sizes[places[0][1].start : places[-1][1].stop]
                parts.append(self._extract_texts(content, of_group, key, self.files[places[0][0]].path))
        return arrow.concat_arrays([*parts, arrow.array([], arrow.large_string())])

    def _read_bytes(self, number: int, begins: np.ndarray, sizes: np.ndarray) -> Any:
        """Return bytes [begin, begin + size) of each span of a file, concatenated."""
        descriptor, state = self._descriptors.get(number, lambda: self._open(number))
        content, cut_span, failure = _csrc.read_spans(descriptor, begins, sizes)
        if failure:
            raise OSError(failure, os.strerror(failure), self.files[number].path)
        # after the read, which finds the begin of a span that was cut since
        if cut_span >= 0 or _stat_descriptor(descriptor) != state:
            raise ValueError(
                f"{self.files[number].path}: has changed since it was registered. "
                "Restore the file, or register it again."
            )
        return content

    def _open(self, number: int) -> tuple[int, tuple[int, int]]:
        """Return (descriptor, (bytes, modification time)) of a file or its unpacked content."""
        file = self.files[number]
        is_plain = file.path.endswith(PLAIN_SUFFIXES)
        path = file.path if is_plain else file.unpack(self.folder)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return descriptor, file.stamp if is_plain else _stat_descriptor(descriptor)

    def _extract_texts(self, content: bytes, sizes: np.ndarray, key: str, path: str) -> Any:
        """Return the texts of JSON lines, one call of DuckDB for all files of a chunk."""
        arrow, ends = import_pyarrow(), np.append(0, np.cumsum(sizes))

        def extract(content: bytes) -> Any:
            buffers = [None, arrow.py_buffer(ends), arrow.py_buffer(content)]
            records = arrow.Array.from_buffers(arrow.large_string(), len(sizes), buffers)
            self._scratch.register("lines", arrow.table({"record": records}))
            statement = f"SELECT json_extract_string(record, {json_path(key)}) AS text FROM lines"
            texts = self._scratch.sql(statement).to_arrow_table().column("text")
            return texts.cast(arrow.large_string()).combine_chunks()

        try:
            return extract(content)
        except (import_duckdb().Error, arrow.ArrowException):
            # registration has accepted every line after this replacement
            with explain_errors(f"{path}: got lines that are not JSON"):
                return extract(replace_lone_surrogates(content))
