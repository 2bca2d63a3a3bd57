"""A server's folder: one catalog, the mixtures that clients create at run time, and the access token.

    DIR/catalog/                          files that clients register
    DIR/mixtures/NAME.yaml                mixtures; also those that a user writes there before the start
    DIR/mixtures/NAME.mixture/            their documents as selected when they were created, logs of runs
    DIR/token                             mode 0600

A mixture keeps the documents of its creation: files that are registered later change no running training. A
client that asks for the same mixture again gets the same one, also from a server that was started again.
"""

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import write_atomic
from megatron.log import get_logger
from megatron.mixture.catalog.catalog import Catalog, RegistrationResult
from megatron.mixture.catalog.query import Query, QueryResult
from megatron.mixture.compute_property import describe_corpus
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.lazy_imports import import_duckdb, import_pyarrow
from megatron.mixture.serve.catalog_protocol import (
    Registration,
    format_spec,
    read_flag,
    read_mixture_request,
    read_name,
    read_registration,
    read_request,
    read_word,
    read_words,
)
from megatron.mixture.serve.jobs import BusyError, JobQueue, RateLimiter
from megatron.mixture.spec import read_spec
from megatron.plan.mixture_use import mixture_folder
from megatron.text.token_counts import TokenCounter
from megatron.tokenizer.kinds import TokenizerSpec

CATALOG, MIXTURES, TOKEN, SELECTED = "catalog", "mixtures", "token", "selected.arrow"
MAX_MIXTURES = 64  # open at a time; each keeps its documents' places in memory
MAX_QUERIES = 4  # at a time
MAX_DOMAINS = 3000  # of a mixture or of the reply to a query
REQUESTS_PER_S, BURST = 10.0, 100  # that read or change the catalog
SLICE_FILES, SLICE_BYTES = 1000, 1 << 30  # registered between two looks at the stop flag
ROWS_PER_TABLE = 1 << 14  # of the reply with documents
DOCUMENT_QUERY_KEYS = ("corpora", "where", "by", "list_domains")

log = get_logger(__name__)


def make_token_file(folder: Path) -> Path:
    """Return the file with the access token of a folder. It is created with mode 0600 if it is missing."""
    path = folder / TOKEN
    try:
        # private from the beginning: no other user can open it before the token is written
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(16) + "\n")
    return path


class ServedDirectory:
    """The catalog and the mixtures of a folder, and the requests about them.

    mixtures   open mixtures by name; the server reads chunks from them
    failures   why mixtures of the folder could not be opened
    on_removed called with a removed mixture, which it closes
    """

    def __init__(self, folder: Path, seed: int, roots: Sequence[Path]) -> None:
        """Open a folder, and create what is missing. Other processes may write its catalog as well.

        roots   folders besides this one whose files may be registered and read
        """
        self.folder, self.seed = folder.resolve(), seed
        self.roots = [self.folder, *(root.resolve() for root in roots)]
        self.catalog = self.folder / CATALOG
        (self.folder / MIXTURES).mkdir(parents=True, exist_ok=True)
        self.mixtures: dict[str, DocumentChunks] = {}
        self.failures: dict[str, str] = {}
        self.on_removed: Callable[[str, DocumentChunks], None] = lambda _, source: source.close()
        self.errors: tuple[type[Exception], ...] = (ValueError, OSError, import_duckdb().Error)
        with Catalog(self.catalog):  # creates it
            pass
        self._writes, self._creations = JobQueue("write"), JobQueue("create", 2)
        self._queries, self._rate = (
            threading.BoundedSemaphore(MAX_QUERIES),
            RateLimiter(REQUESTS_PER_S, BURST),
        )
        self._changes, self._is_stopping = threading.Lock(), threading.Event()
        self.actions: dict[str, Callable[[bytes], dict[str, Any]]] = {
            "register": self._start_registration, "job": self._get_job, "corpora": self._list_corpora,
            "describe_corpus": self._describe_corpus, "broken": self._list_broken,
            "remove_corpus": self._remove_corpus, "query": self._count_documents,
            "create_mixture": self._start_mixture, "mixtures": self._list_mixtures,
            "remove_mixture": self._remove_mixture,
        }  # fmt: skip
        for path in sorted((self.folder / MIXTURES).glob("*.yaml")):
            try:
                self._open_mixture(path)
            except self.errors as error:
                # one mixture whose files are missing does not stop the others
                self.failures[path.stem] = str(error)
                log.warning("%s: the mixture is not served: %s", path, error)

    def close(self) -> None:
        """Stop the jobs. A registration ends after the files in progress; the next one resumes it."""
        self._is_stopping.set()
        self._writes.close()
        self._creations.close()

    def handle(self, kind: str, body: bytes) -> dict[str, Any]:
        """Return the reply to one of `actions`. Raises ValueError, OSError, or BusyError."""
        if kind != "job":  # clients poll it
            self._rate.take()
        return self.actions[kind](body)

    def stream_documents(self, ticket: bytes) -> Iterator[Any]:
        """Yield the documents of a query as Arrow tables, at least one: domain int32, path, row int64.

        The names of the domains are in the schema's metadata. Raises as `handle` does.
        """
        self._rate.take()
        arrow, result = import_pyarrow(), self._run_query(read_request(ticket, (), ("documents", "tokens")))
        paths = np.array([file.path for file in result.files], dtype=object)
        domain, file, begin, end = (result.get_column(of) for of in ("domain", "file", "begin", "end"))
        # documents up to the end of each interval, so that any range of documents is found by bisection
        ends = np.cumsum(end - begin)
        metadata = {"domains": "\n".join(result.names)}
        for first in range(0, max(1, int(ends[-1])), ROWS_PER_TABLE):
            numbers = np.arange(first, min(first + ROWS_PER_TABLE, int(ends[-1])))
            interval = np.searchsorted(ends, numbers, side="right")
            columns = {
                "domain": domain[interval], "path": arrow.array(paths[file[interval]], arrow.string()),
                "row": end[interval] - (ends[interval] - numbers),
            }  # fmt: skip
            yield arrow.table(columns).replace_schema_metadata(metadata)

    def _run_query(self, request: dict[str, Any]) -> QueryResult:
        query = request.get("documents", {})
        if not isinstance(query, dict) or set(query) - set(DOCUMENT_QUERY_KEYS):
            raise ValueError(f"query: expected an object with some of {', '.join(DOCUMENT_QUERY_KEYS)}.")
        selected = Query(
            tuple(read_words(query, "corpora")), tuple(read_words(query, "where")),
            read_word(query, "list_domains", "once"),
        )  # fmt: skip
        if not self._queries.acquire(blocking=False):
            raise BusyError(f"{MAX_QUERIES} queries are running. Send the query again later.")
        try:
            with Catalog(self.catalog, read_only=True) as catalog:
                tokens = read_flag(request, "tokens")
                # a name that is given twice is one name
                result = selected.run(catalog, list(dict.fromkeys(read_words(query, "by"))), tokens)
        finally:
            self._queries.release()
        _check_domains(result)
        return result

    def _count_documents(self, body: bytes) -> dict[str, Any]:
        result = self._run_query(read_request(body, (), ("documents", "tokens")))
        return {
            "by": list(result.by),
            "domains": [[_to_json(value) for value in values] for values in result.domains],
            "documents": result.n_documents.tolist(),
            "tokens": None if result.n_tokens is None else list(result.n_tokens),
            "identity": result.compute_identity(),
        }

    def _list_corpora(self, body: bytes) -> dict[str, Any]:
        read_request(body, ())
        with Catalog(self.catalog, read_only=True) as catalog:
            return {"corpora": [asdict(corpus) for corpus in catalog.summarize_corpora()]}

    def _describe_corpus(self, body: bytes) -> dict[str, Any]:
        name = read_name(read_request(body, ("corpus",)), "corpus")
        with Catalog(self.catalog, read_only=True) as catalog:
            rows = describe_corpus(catalog, name)
        return {
            "properties": {
                prop: [[_to_json(value), n, tokens] for value, n, tokens in values]
                for prop, values in rows.items()
            }
        }

    def _list_broken(self, body: bytes) -> dict[str, Any]:
        name = read_name(read_request(body, ("corpus",)), "corpus")
        with Catalog(self.catalog, read_only=True) as catalog:
            return {"broken": catalog.list_broken(name)[:1000]}

    def _start_registration(self, body: bytes) -> dict[str, Any]:
        registration = read_registration(body, self.folder, self.roots)
        job = f"register {registration.corpus} {_hash_text(repr(registration))}"
        self._writes.start(job, lambda: self._register(registration))
        return {"job": job}

    def _register(self, registration: Registration) -> dict[str, Any]:
        counter = None
        if registration.tokenizer is not None:
            spec = TokenizerSpec(model=registration.tokenizer)
            counter = TokenCounter(spec, registration.append_eod, True, len(os.sched_getaffinity(0)))
        total = RegistrationResult()
        with Catalog(self.catalog) as catalog:
            for files in _iter_slices(registration.files):
                if self._is_stopping.is_set():
                    raise ValueError("the server is stopping. Register the files again to resume.")
                done = catalog.register(
                    registration.corpus, files, registration.properties, registration.text_key,
                    quiet=True, counter=counter,
                )  # fmt: skip
                for count in ("n_files", "n_known", "n_documents", "n_broken", "n_edited"):
                    setattr(total, count, getattr(total, count) + getattr(done, count))
                total.absent = done.absent
        return asdict(total)

    def _remove_corpus(self, body: bytes) -> dict[str, Any]:
        name = read_name(read_request(body, ("corpus",)), "corpus")

        def remove() -> dict[str, Any]:
            with Catalog(self.catalog) as catalog:
                catalog.remove(name)
            return {}

        self._writes.start(f"remove {name}", remove)
        return {"job": f"remove {name}"}

    def _get_job(self, body: bytes) -> dict[str, Any]:
        name = read_word(read_request(body, ("job",)), "job")
        state = self._writes.get(name, self.errors) or self._creations.get(name, self.errors)
        return state or {"state": "unknown"}

    def _start_mixture(self, body: bytes) -> dict[str, Any]:
        name, spec = read_mixture_request(body)
        text = format_spec({**spec, "catalog": f"../{CATALOG}"}) + "\n"
        path = self.folder / MIXTURES / f"{name}.yaml"
        # the same mixture is the same job; another one of the same name is refused by _create_mixture
        job = f"create {name} {_hash_text(text)}"
        self._creations.start(job, lambda: self._create_mixture(path, text))
        return {"job": job, "mixture": name}

    def _create_mixture(self, path: Path, text: str) -> dict[str, Any]:
        with self._changes:
            is_new = not path.is_file()
            if not is_new and path.read_text() != text:
                raise ValueError(
                    f"name: got '{path.stem}', which another mixture has. Remove it, or use another name."
                )
            if is_new and len(list(path.parent.glob("*.yaml"))) >= MAX_MIXTURES:
                raise ValueError(f"{MAX_MIXTURES} mixtures exist. Remove one of them.")
            if is_new:
                write_atomic(path, text)
        if path.stem not in self.mixtures:
            try:
                self._open_mixture(path)
            except BaseException:
                if is_new:
                    path.unlink(missing_ok=True)
                raise
            self.failures.pop(path.stem, None)
        source = self.mixtures[path.stem]
        documents = dict(zip(source.names, source.counts.tolist(), strict=True))
        return {"mixture": path.stem, "identity": source.identity, "documents": documents}

    def _open_mixture(self, path: Path) -> None:
        """Open a mixture with the documents of its creation, or select them now if it is new."""
        spec, saved = read_spec(path), mixture_folder(path) / SELECTED
        if Path(spec.catalog).resolve() != self.catalog:
            raise ValueError(f"{path}: catalog: got {spec.catalog}, expected ../{CATALOG}. Correct it.")
        if saved.is_file():
            result = QueryResult.load(saved)
        else:
            with spec.open_catalog() as catalog:
                result = spec.make_query().run(catalog, spec.by, spec.counts_tokens)
            _check_domains(result)
        source = DocumentChunks(path, self.seed, run=None, roots=self.roots, selected=result)
        if not saved.is_file():
            saved.parent.mkdir(exist_ok=True)
            result.save(saved)
        self.mixtures[path.stem] = source

    def _list_mixtures(self, body: bytes) -> dict[str, Any]:
        read_request(body, ())
        return {"mixtures": sorted(self.mixtures), "failures": self.failures}

    def _remove_mixture(self, body: bytes) -> dict[str, Any]:
        name = read_name(read_request(body, ("mixture",)), "mixture")
        with self._changes:
            path = self.folder / MIXTURES / f"{name}.yaml"
            if name not in self.mixtures and not path.is_file():
                raise ValueError(
                    f"mixture: got '{name}', expected one of {', '.join(sorted(self.mixtures))}."
                )
            # the file first: a server that is killed here has no mixture of this name any more
            path.unlink(missing_ok=True)
            (mixture_folder(path) / SELECTED).unlink(missing_ok=True)
            self.failures.pop(name, None)
            source = self.mixtures.pop(name, None)
        if source is not None:
            self.on_removed(name, source)
        return {}


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_domains(result: QueryResult) -> None:
    if len(result.domains) > MAX_DOMAINS:
        raise ValueError(
            f"by: got {len(result.domains):,} domains, expected at most {MAX_DOMAINS:,}. "
            "Use other properties."
        )


def _iter_slices(files: Sequence[str]) -> Iterator[list[str]]:
    """Yield the files in slices of limited size and number."""
    part: list[str] = []
    n_bytes = 0
    for file in files:
        part.append(file)
        n_bytes += os.stat(file).st_size
        if len(part) >= SLICE_FILES or n_bytes >= SLICE_BYTES:
            yield part
            part, n_bytes = [], 0
    if part:
        yield part


def _to_json(value: Any) -> Any:
    """Return a value of a property for JSON: a date as text, NaN and Inf as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and np.isfinite(value) else str(value)
