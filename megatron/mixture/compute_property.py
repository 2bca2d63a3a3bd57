"""Compute a property of all documents of a corpus by a Python function, in processes, and resumable.

The function comes from the command line of the user: computing imports its module and runs it. It gets a list
of documents, as chunks return them (texts; ids of .bin/.idx datasets; dicts of tar samples), and returns a
list with one value each. A class is created once in each process, and its instances are called: it can load a
model. Each part of PART_DOCUMENTS documents appears as a whole, so that a killed computation loses few parts.
"""

import ast
import hashlib
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.cli import ProgressBar
from megatron.io import acquire_lock, read_json, write_json
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.computed import (
    META,
    ComputedColumns,
    ComputedProperty,
    corpus_folder,
    list_computed,
    list_corpus_files,
    read_values,
)
from megatron.mixture.catalog.histogram import HistogramRow, count_values
from megatron.mixture.catalog.properties import read_property
from megatron.mixture.catalog.query import SourceFile, load_source_files
from megatron.mixture.custom_rule import find_module_spec
from megatron.mixture.document_locations import locate_files
from megatron.mixture.property_worker import DocumentRange, compute_part, start_process, write_values
from megatron.mixture.settings import RULE_CLASS

PART_DOCUMENTS = 1 << 13
GROUP_FILES, GROUP_DOCUMENTS = 1000, 1 << 22  # whose places are in memory at a time


@dataclass(frozen=True)
class ComputeResult:
    """Counts of one computation; `n_known` documents had values already."""

    n_files: int
    n_documents: int
    n_known: int


def compute_property(
    catalog: Path, corpus: str, name: str, function: str, kind: str = "string", n_processes: int = 1,
    batch: int = 256, replace: bool = False, quiet: bool = False,
) -> ComputeResult:  # fmt: skip
    """Compute a property of all documents of a corpus that have no value of it yet.

    function   module:name of a function or class, imported from PYTHONPATH
    kind       a key of TYPES
    n_processes   1: in this process, which a function that crashes ends
    batch      documents per call
    replace    drop values that another function, or another version of its source, has computed

    Raises ValueError for an invalid name or function, for a property that exists already, for values of
    another type (with the document), and if another process computes the property. Computed parts stay.
    """
    prop = _describe_property(catalog, corpus, name, function, kind)
    prop.folder.mkdir(parents=True, exist_ok=True)
    lock = acquire_lock(prop.folder / ".lock")
    if lock is None:
        raise ValueError(f"{prop.folder}: another process computes the property. Wait for its end.")
    try:
        _prepare_folder(prop, replace)
        with Catalog(catalog, read_only=True) as opened:
            table, all_files = opened.get_corpus(corpus).table, load_source_files(opened)
            files = list(list_corpus_files(opened.connection, table, all_files).items())
        n_all = sum(file.n_documents for _, file in files)
        missing = [(id, file) for id, file in files if not prop.values_path(file).is_file()]
        n_missing = sum(file.n_documents for _, file in missing)
        if not missing:
            return ComputeResult(len(files), n_all, n_all)
        with ProgressBar("computing", n_missing, "documents", quiet=quiet) as bar:
            n_done = _compute_files(prop, catalog, missing, n_processes, batch, bar.update)
        shutil.rmtree(prop.folder / "unpacked", ignore_errors=True)
        return ComputeResult(len(files), n_all, n_all - n_done)
    finally:
        lock.close()


def remove_computed(catalog: Path, corpus: str, name: str | None = None) -> None:
    """Delete a computed property of a corpus, or all of them.

    Raises ValueError if there is none of that name.
    """
    if name is None:
        shutil.rmtree(corpus_folder(catalog, corpus), ignore_errors=True)
        return
    computed = list_computed(catalog, corpus)
    if name not in computed:
        available = ", ".join(computed) or "none"
        raise ValueError(
            f"property '{name}' of {corpus}: is not a computed property; expected one of {available}."
        )
    # the description first: without it the rest is not a property
    (computed[name].folder / META).unlink()
    shutil.rmtree(computed[name].folder)


def describe_corpus(catalog: Catalog, corpus: str) -> dict[str, list[HistogramRow]]:
    """Return (value, documents, tokens) for each property of a corpus, and for each computed one."""
    counts, described = catalog.describe_corpus(corpus), catalog.get_corpus(corpus)
    columns = ComputedColumns(catalog.path, [described])
    properties = columns.properties[corpus]
    table, _ = columns.join(catalog.connection, list(properties), load_source_files(catalog))[corpus]
    computed = {name: count_values(catalog.connection, table, prop.prop) for name, prop in properties.items()}
    return counts | computed


def _describe_property(catalog: Path, corpus: str, name: str, function: str, kind: str) -> ComputedProperty:
    prop = read_property(f"{name} AS {name} {kind}")  # raises for invalid names and types
    with Catalog(catalog, read_only=True) as opened:
        registered = {registered.name for registered in opened.get_corpus(corpus).properties}
    if prop.name in registered:
        raise ValueError(f"property '{name}': {corpus} was registered with it. Use another name.")
    if not RULE_CLASS.fullmatch(function):
        raise ValueError(f"function: got {function!r}, expected module:name.")
    module, _, attribute = function.partition(":")
    spec = find_module_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ValueError(f"function {function}: got no module {module}.py. Add its folder to PYTHONPATH.")
    source = Path(spec.origin).read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(
            f"function {function}: {spec.origin} cannot be parsed ({error}). Correct it."
        ) from error
    definitions = (ast.FunctionDef, ast.ClassDef)
    if attribute not in {node.name for node in tree.body if isinstance(node, definitions)}:
        raise ValueError(
            f"function {function}: got {spec.origin}, which defines no function or class {attribute}."
        )
    folder = corpus_folder(catalog, corpus) / prop.name
    return ComputedProperty(prop.name, prop.kind, function, hashlib.sha256(source).hexdigest(), folder)


def _prepare_folder(prop: ComputedProperty, replace: bool) -> None:
    """Write the description, or compare it with the one that is there."""
    record = {"kind": prop.kind, "function": prop.function, "sha256": prop.sha256}
    path = prop.folder / META
    if path.is_file():
        old = _read_description(path)
        if old == record:
            return
        if not replace:
            changed = "another version of its source" if old.get("function") == prop.function else (
                f"{old.get('function')} of type {old.get('kind')}"
            )  # fmt: skip
            raise ValueError(
                f"property '{prop.name}': got values of {changed}. Pass --replace to compute all of them "
                "again, or use another name."
            )
        path.unlink()  # from here on there is no property until the description is written
    for entry in prop.folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != ".lock":
            entry.unlink()
    write_json(path, record)


def _read_description(path: Path) -> dict[str, Any]:
    """Return the description in a property's folder; empty if it is damaged."""
    try:
        return read_json(path) or {}
    except ValueError:
        return {}


def _compute_files(
    prop: ComputedProperty, catalog: Path, files: Sequence[tuple[int, SourceFile]], n_processes: int,
    batch: int, on_progress: Callable[[int], None],
) -> int:  # fmt: skip
    """Compute the values of files, and return the number of documents that had none."""
    n_computed, settings = 0, (prop.function, prop.kind, batch)
    executor: Executor
    if n_processes == 1:
        executor = _InlineExecutor()
        start_process(*settings)
    else:
        # spawn: a forked child of a process with threads (Arrow, DuckDB) may hang
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(n_processes, context, start_process, settings)
    try:
        for group in _iter_groups(files):
            with Catalog(catalog, read_only=True) as opened:
                located = locate_files(opened, [file for _, file in group])
                spans = {file.id: pair for (_, file), pair in zip(group, located, strict=True)}
            running: set[Future[int]] = set()
            for part in _iter_parts(prop, group, spans):
                if part.path.is_file():
                    on_progress(part.end - part.begin)
                    continue
                running.add(executor.submit(compute_part, part, prop.folder))
                if len(running) >= 2 * n_processes:
                    n_computed += _collect(running, on_progress, FIRST_COMPLETED)
            while running:
                n_computed += _collect(running, on_progress, FIRST_COMPLETED)
            for _, file in group:
                _join_parts(prop, file)
    except BrokenProcessPool as error:
        raise ValueError(
            f"function {prop.function}: a process ended without an answer, perhaps killed for its memory. "
            "Run it again with fewer --processes to resume."
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)
    return n_computed


class _InlineExecutor(Executor):
    """Executor that runs each call in this thread, when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _collect(running: set[Future[int]], on_progress: Callable[[int], None], when: str) -> int:
    done = wait(running, return_when=when).done
    running -= done
    counts = [future.result() for future in done]
    on_progress(sum(counts))
    return sum(counts)


def _iter_groups(files: Sequence[tuple[int, SourceFile]]) -> Iterator[list[tuple[int, SourceFile]]]:
    group: list[tuple[int, SourceFile]] = []
    n = 0
    for entry in files:
        group.append(entry)
        n += entry[1].n_documents
        if len(group) >= GROUP_FILES or n >= GROUP_DOCUMENTS:
            yield group
            group, n = [], 0
    if group:
        yield group


def _parts_folder(prop: ComputedProperty, file: SourceFile) -> Path:
    return prop.values_path(file).with_suffix(".parts")


def _iter_parts(
    prop: ComputedProperty, group: Sequence[tuple[int, SourceFile]],
    spans: Mapping[int, tuple[np.ndarray, np.ndarray]],
) -> Iterator[DocumentRange]:  # fmt: skip
    seen: set[Path] = set()
    for _, file in group:
        folder = _parts_folder(prop, file)
        if folder in seen:  # two files with the same content have the same values
            continue
        seen.add(folder)
        folder.mkdir(exist_ok=True)
        begins, sizes = spans[file.id]
        for begin in range(0, file.n_documents, PART_DOCUMENTS):
            end = min(begin + PART_DOCUMENTS, file.n_documents)
            part = begins[begin:end], sizes[begin:end]
            yield DocumentRange(file, part, begin, end, folder / f"{begin}.arrow")


def _join_parts(prop: ComputedProperty, file: SourceFile) -> None:
    """Write the values of a file from its parts, and delete them."""
    path, folder = prop.values_path(file), _parts_folder(prop, file)
    if not path.is_file():
        pieces = [
            read_values(folder / f"{begin}.arrow", prop.kind, min(PART_DOCUMENTS, file.n_documents - begin))
            for begin in range(0, file.n_documents, PART_DOCUMENTS)
        ]
        write_values(path, prop.kind, [chunk for piece in pieces for chunk in piece.chunks])
    shutil.rmtree(folder, ignore_errors=True)
