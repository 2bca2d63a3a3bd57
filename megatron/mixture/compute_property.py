"""Compute a property of all documents of a corpus by a Python function, in processes, and resumable.

The function comes from the command line of the user: computing imports its module and runs it. It gets a list
of documents, as chunks return them (texts; ids of .bin/.idx datasets; dicts of tar samples), and returns a
list with one value each. A class is created once in each process, and its instances are called: it can load a
model. Each part of PART_DOCUMENTS documents appears as a whole, so that a killed computation loses few parts.
"""

import ast
import hashlib
import importlib
import inspect
import math
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import acquire_lock, atomic_path, read_json, write_json
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.computed import (
    META,
    VALUES,
    ComputedProperty,
    corpus_folder,
    list_computed,
    list_corpus_files,
    make_value_type,
    read_values,
)
from megatron.mixture.catalog.properties import read_property
from megatron.mixture.catalog.query import SourceFile
from megatron.mixture.custom_rule import find_module_spec
from megatron.mixture.document_chunks import open_documents
from megatron.mixture.lazy_imports import import_pyarrow
from megatron.mixture.settings import RULE_CLASS
from megatron.terminal import ProgressBar

PART_DOCUMENTS = 1 << 13
GROUP_FILES, GROUP_DOCUMENTS = 1000, 1 << 22  # whose places are in memory at a time
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "category": (str,), "integer": (int,), "float": (int, float),
    "boolean": (bool,), "date": (date,), "list": (list,),
}  # fmt: skip


@dataclass(frozen=True)
class ComputeResult:
    """Counts of one computation; `n_known` documents had values already."""

    n_files: int
    n_documents: int
    n_known: int


@dataclass(frozen=True)
class _Part:
    """Documents begin to end - 1 of a file, whose values go to `path`.

    spans   (begin, size) of the documents in the file, as Catalog.locate_texts returns them
    """

    file: SourceFile
    spans: tuple[np.ndarray, np.ndarray]
    begin: int
    end: int
    path: Path


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
            files = list(list_corpus_files(opened, opened.get_corpus(corpus)).items())
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
        known = ", ".join(computed) or "none"
        raise ValueError(
            f"property '{name}' of {corpus}: is not a computed property; expected one of {known}."
        )
    # the description first: without it the rest is not a property
    (computed[name].folder / META).unlink()
    shutil.rmtree(computed[name].folder)


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
        _start_process(*settings)
    else:
        # spawn: a forked child of a process with threads (Arrow, DuckDB) may hang
        context = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(n_processes, context, _start_process, settings)
    try:
        for group in _iter_groups(files):
            with Catalog(catalog, read_only=True) as opened:
                spans = opened.locate_texts([file.id for _, file in group])
            running: set[Future[int]] = set()
            for part in _iter_parts(prop, group, spans):
                if part.path.is_file():
                    on_progress(part.end - part.begin)
                    continue
                running.add(executor.submit(_compute_part, part, prop.folder))
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
) -> Iterator[_Part]:  # fmt: skip
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
            # .bin/.idx datasets are read by the number of the document, other files by these spans
            part = (begins, sizes) if file.path.endswith(".bin") else (begins[begin:end], sizes[begin:end])
            yield _Part(file, part, begin, end, folder / f"{begin}.arrow")


def _join_parts(prop: ComputedProperty, file: SourceFile) -> None:
    """Write the values of a file from its parts, and delete them."""
    path, folder = prop.values_path(file), _parts_folder(prop, file)
    if not path.is_file():
        pieces = [
            read_values(folder / f"{begin}.arrow", prop.kind, min(PART_DOCUMENTS, file.n_documents - begin))
            for begin in range(0, file.n_documents, PART_DOCUMENTS)
        ]
        _write_values(path, prop.kind, [chunk for piece in pieces for chunk in piece.chunks])
    shutil.rmtree(folder, ignore_errors=True)


def _write_values(path: Path, kind: str, chunks: Sequence[Any]) -> None:
    arrow = import_pyarrow()
    table = arrow.table({VALUES: arrow.chunked_array(chunks, make_value_type(kind))})
    with (
        atomic_path(path) as partial,
        arrow.OSFile(str(partial), "wb") as sink,
        arrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)


# in the processes

_compute: Any = None
_settings: tuple[str, str, int] = ("", "", 0)


def _start_process(function: str, kind: str, batch: int) -> None:
    """Import the function. A class is created once in each process."""
    global _settings, _compute
    _settings, _compute = (function, kind, batch), None
    # an earlier computation of this process may have imported another version of the source
    sys.modules.pop(function.partition(":")[0], None)
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        # a main process that was killed cannot end its processes, which would wait for work forever
        assert parent is not None, "only the processes of an executor have this thread"
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=end_with_parent, daemon=True).start()


def _load_function() -> Any:
    global _compute
    if _compute is None:
        function = _settings[0]
        module, _, name = function.partition(":")
        try:
            target = getattr(importlib.import_module(module), name)
            _compute = target() if inspect.isclass(target) else target
        except Exception as error:  # code of the user may raise anything
            raise ValueError(
                f"function {function}: cannot be loaded ({type(error).__name__}: {error}). Correct it."
            ) from None
    return _compute


def _compute_part(part: _Part, folder: Path) -> int:
    """Compute the values of one part, write them, and return the number of documents."""
    function, kind, batch = _settings
    compute, values = _load_function(), list[Any]()
    # numbers count from the first span
    first = part.begin if part.file.path.endswith(".bin") else 0
    with open_documents(part.file, part.spans, folder) as read:
        for begin in range(part.begin, part.end, batch):
            end = min(begin + batch, part.end)
            documents = read(np.arange(begin - part.begin + first, end - part.begin + first))
            place = f"{part.file.path}, documents {begin + 1:,} to {end:,}"
            try:
                answer = compute(documents)
            except Exception as error:  # as above
                raise ValueError(
                    f"{place}: {function} raised {type(error).__name__} ({error}). "
                    "Correct it, and run the command again with --replace."
                ) from None
            answer = answer.tolist() if isinstance(answer, np.ndarray) else answer
            if not isinstance(answer, list | tuple) or len(answer) != len(documents):
                n = len(answer) if isinstance(answer, list | tuple) else type(answer).__name__
                raise ValueError(
                    f"{place}: {function} returned {n}, expected a list of {len(documents)} values."
                )
            values += [
                check_value(value, kind, f"{part.file.path}, document {begin + i + 1:,}: {function}")
                for i, value in enumerate(answer)
            ]
    _write_values(part.path, kind, [import_pyarrow().array(values, make_value_type(kind))])
    return part.end - part.begin


def check_value(value: Any, kind: str, place: str) -> Any:
    """Return a value of a kind of TYPES for Arrow. Raises ValueError for None, NaN, Inf and other types."""
    if isinstance(value, np.generic):
        value = value.item()
    if kind == "date" and isinstance(value, str):
        try:
            value = date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"{place}: got {value!r}, expected a date such as 2024-02-29.") from None
    # bool is a subclass of int, and datetime of date
    is_right = isinstance(value, PYTHON_TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")
    if kind == "list" and is_right:
        is_right = all(isinstance(element, str) for element in value)
    if not is_right or isinstance(value, datetime):
        raise ValueError(f"{place}: got {value!r:.80}, expected a value of type {kind}.")
    if kind == "integer" and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{place}: got {value}, expected an integer of 64 bits.")
    if kind == "float" and not math.isfinite(value):
        raise ValueError(f"{place}: got {value}, expected a finite number.")
    for text in value if kind == "list" else [value] if isinstance(value, str) else []:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{place}: got {text!r:.80}, expected text that is UTF-8.") from None
    return float(value) if kind == "float" else value
