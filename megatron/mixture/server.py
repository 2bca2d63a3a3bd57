"""Server of a folder over Arrow Flight: its clients register, query, mix and read chunks.

    FOLDER/catalog        the catalog
    FOLDER/NAME.yaml      mixtures, written by hand or by clients
    FOLDER/token          access token of mode 0600

It is for a trusted network. Requests contain names, paths and JSON; nothing in
them is executed. The server keeps no state of its clients: a request for chunks
contains the position from which they are computed, and one piece of an answer
is in memory.
"""

import hashlib
import hmac
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.section import check_known_keys
from megatron.io import write_atomic
from megatron.mixture.catalog import Catalog
from megatron.mixture.client import NOT_YET
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.files import explain_errors, import_flight, import_pyarrow
from megatron.mixture.learner import RUN_NAME
from megatron.mixture.properties import read_properties
from megatron.mixture.query import Query, Selection
from megatron.mixture.registration import find_input_files
from megatron.mixture.weights import NotReadyError
from megatron.text.token_counts import TokenCounter

MAX_CHUNKS = 64  # per request
MAX_SOURCES = 256  # mixtures, and runs of adaptive ones, open at a time
PIECE_ROWS = 1 << 14  # rows of an answer to a query that are in memory
# others may be reached from other machines
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
SPEC_KEYS = ("corpora", "where", "by", "weights", "count", "schedule",
             "adaptive", "dry", "shuffle", "chunk_size")  # fmt: skip


class ServedFolder:
    """Answers to the requests of clients, independent of the transport."""

    def __init__(self, folder: Path, seed: int = 0, roots: Sequence[Path] = ()) -> None:
        """Serve `folder`.

        roots   further folders that clients may
                register from and mixtures may read
        """
        self.folder, self.seed = folder.resolve(), seed
        self.roots = [self.folder, *(root.resolve() for root in roots)]
        # without roots: what is registered, wherever it is
        self._read_roots = self.roots if roots else []
        self._sources: dict[tuple[str, str | None], DocumentChunks] = {}
        # a mixture is opened once, and one registration runs at a time
        self._opening, self._writing = threading.Lock(), threading.Lock()
        self.actions: dict[str, Callable[[dict[str, Any]], Any]] = {
            "register": self._register,
            "count": self._count_documents,
            "create_mixture": self._create_mixture,
            "describe": self._describe,
            "position": self._find_position,
            "report": self._report,
            "status": lambda _: {"mixtures": self.list_mixtures(), "open": sorted(map(str, self._sources))},
        }

    def handle_action(self, kind: str, body: bytes) -> Any:
        """Return the reply to an action, ready for JSON.

        Raises ValueError for an invalid request.
        """
        if kind not in self.actions:
            raise ValueError(f"action {kind!r}: expected one of {', '.join(self.actions)}.")
        return self.actions[kind](parse_request(body))

    def close(self) -> None:
        """Close the mixtures and the logs of runs."""
        for source in self._sources.values():
            source.close()

    def _read(self, ask: Callable[[Catalog], Any]) -> Any:
        with Catalog(self.folder / "catalog", read_only=True) as catalog:
            return ask(catalog)

    def list_mixtures(self) -> list[str]:
        """Return the names of the mixtures."""
        names = (path.stem for path in self.folder.glob("*.yaml"))
        return sorted(filter(RUN_NAME.fullmatch, names))

    def open_mixture(self, request: dict[str, Any]) -> DocumentChunks:
        """Return the mixture of a request, or the run of it whose losses its weights follow."""
        name, run = str(request.get("mixture")), str(request.get("run", "main"))
        with self._opening:
            source = self._open_source(name, None)
            if request.get("identity", source.identity) != source.identity:
                raise ValueError(f"mixture {name!r}: its documents have changed. Start a new run.")
            return source if source.spec.settings.adaptive is None else self._open_source(name, run)

    def _open_source(self, name: str, run: str | None) -> DocumentChunks:
        if (name, run) not in self._sources:
            if name not in self.list_mixtures():
                available = ", ".join(self.list_mixtures()) or "none"
                raise ValueError(f"mixture {name!r}: expected one of {available}.")
            if len(self._sources) >= MAX_SOURCES:
                raise ValueError(f"{MAX_SOURCES} mixtures and runs are open already. Restart the server.")
            path, roots = self.folder / f"{name}.yaml", self._read_roots
            self._sources[name, run] = DocumentChunks(path, self.seed, run=run, roots=roots)
        return self._sources[name, run]

    def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        source = self.open_mixture(request)
        meta = {key: getattr(source, key) for key in ("identity", "chunk_size", "at_once")}
        return meta | {"domains": source.names}

    def _find_position(self, request: dict[str, Any]) -> dict[str, Any]:
        source, chunk = self.open_mixture(request), _read_count(request, "chunk")
        return source.find_position(chunk, request.get("position"))

    def _report(self, request: dict[str, Any]) -> bool:
        source, chunk = self.open_mixture(request), _read_count(request, "chunk")
        nats, tokens = (np.array(request.get(key), dtype=np.float64) for key in ("nats", "tokens"))
        return source.report(chunk, nats, tokens)

    def stream(self, ticket: bytes) -> Iterator[Any]:
        """Yield Arrow tables, at least one, each read when it is requested."""
        request = parse_request(ticket)
        if "query" in request:
            yield from self._stream_documents(request["query"])
            return
        source = self.open_mixture(request)
        first, n = _read_count(request, "first"), _read_count(request, "n")
        if n > MAX_CHUNKS:
            raise ValueError(f"n: got {n} chunks, expected at most {MAX_CHUNKS}. Request fewer.")
        yield from source.read_pieces(first, n, request.get("position"))

    def _select(self, query: Any, count_tokens: bool = False) -> Selection:
        if not isinstance(query, dict):
            raise ValueError(f"query: got {query!r}, expected where, by and corpora.")
        where = query.get("where", [])
        query = query | {"where": [where] if isinstance(where, str) else where}
        where, corpora, by = (tuple(map(str, query.get(key, []))) for key in ("where", "corpora", "by"))
        described = Query(corpora, where)
        return self._read(lambda catalog: described.run(catalog, by, count_tokens))

    def _count_documents(self, request: dict[str, Any]) -> list[Any]:
        result = self._select(request.get("query"), bool(request.get("tokens")))
        n_tokens = result.n_tokens or repeat(None)
        return list(zip(result.domains, result.n_documents.tolist(), n_tokens, strict=False))

    def _stream_documents(self, query: Any) -> Iterator[Any]:
        result, arrow = self._select(query), import_pyarrow()
        paths = arrow.array([file.path for file in result.files])
        names = arrow.array(result.names)
        domain = np.repeat(np.arange(len(result.names)), result.n_documents)
        for first in range(0, len(domain), PIECE_ROWS):
            rows = result.documents.slice(first, PIECE_ROWS)
            path = paths.take(rows.column("file").combine_chunks())
            name = names.take(arrow.array(domain[first : first + PIECE_ROWS]))
            yield arrow.table({"domain": name, "path": path, "row": rows.column("row")})

    def _register(self, request: dict[str, Any]) -> dict[str, Any]:
        texts = [str(text) for text in request.get("properties", [])]
        for prop in read_properties(texts):
            if not prop.is_path:
                raise ValueError(
                    f"property {str(prop)!r}: got SQL, expected a path. Register it on the server's machine."
                )
        inputs = [str(self.folder / str(word)) for word in request.get("inputs", [])]
        for path in find_input_files(inputs):
            if not any(path.resolve().is_relative_to(root) for root in self.roots):
                below = ", ".join(map(str, self.roots))
                raise ValueError(f"{path}: is not below {below}. Start the server with --root.")
        counter = None
        if request.get("tokenizer") is not None:
            counter = TokenCounter(str(request["tokenizer"]), bool(request.get("append_eod")))
        properties = read_properties(texts, request.get("preset"))
        text_key = str(request.get("text_key", "text"))
        with self._writing, Catalog(self.folder / "catalog") as catalog:
            result = catalog.register(str(request["corpus"]), inputs, properties, text_key, True, counter)
        return vars(result)

    def add_property(self, request: dict[str, Any], rows: Any) -> int:
        """Add the property of an Arrow table, as `Catalog.add_property`."""
        with self._writing, Catalog(self.folder / "catalog") as catalog:
            return catalog.add_property(str(request["corpus"]), str(request["property"]), rows)

    def _create_mixture(self, request: dict[str, Any]) -> str:
        """Write a mixture with the documents that the catalog has now, and return its name."""
        spec: dict[str, Any] = request["spec"]
        check_known_keys(spec, SPEC_KEYS, "mixture on a server")
        rule = (spec.get("adaptive") or {}).get("rule", "ado")
        if rule != "ado":
            raise ValueError(f"adaptive.rule: got {rule!r}, expected ado on a server.")
        sums = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
        # the keys are hashed, so that the same request gets the same mixture
        name = f"mixture-{sums[:12]}"
        path = self.folder / f"{name}.yaml"
        with self._writing:
            if path.exists():
                return name
            versions = self._read(lambda catalog: catalog.versions)
            content = spec | {"catalog": "catalog", "snapshot": versions}
            write_atomic(path, f"# created by a client\n{json.dumps(content, indent=1)}\n")
            try:
                self.open_mixture({"mixture": name})
            except Exception:
                path.unlink()
                raise
        return name


def parse_request(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises ValueError for other content, or RecursionError.
    """
    request = json.loads(body or b"{}")
    if not isinstance(request, dict):
        raise ValueError(f"request: got {type(request).__name__}, expected an object.")
    return request


def _read_count(request: dict[str, Any], name: str) -> int:
    value = request.get(name)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{name}: got {value!r}, expected a number of at least 0.")
    return value


def translate_errors(make: Callable[[], Any]) -> Any:
    """Return make(), whose errors become Flight's: `refused:` and one line."""
    fl = import_flight()
    try:
        return make()
    except NotReadyError as error:
        raise fl.FlightServerError(f"{NOT_YET}{error}") from error
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        why = f"request: missing or wrong {why}" if isinstance(error, KeyError | TypeError) else why
        raise fl.FlightServerError(f"refused: {why}") from error


def stream_batches(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches of a table and of those that follow."""
    yield from first.to_batches()
    while (table := translate_errors(lambda: next(rest, None))) is not None:
        yield from table.to_batches()


def make_server(
    served: ServedFolder, token: str, host: str = "127.0.0.1", port: int = 0,
    tls: tuple[bytes, bytes] | None = None, allow_plain: bool = False,
) -> Any:  # fmt: skip
    """Return a running Flight server, whose `port` is the socket's.

    tls   certificate and key; beyond this machine they are required, or `allow_plain`

    Raises ValueError for an address without
    this protection, or that is not available.
    """
    host = host.strip("[]")
    if host not in LOCAL_HOSTS and tls is None and not allow_plain:
        raise ValueError(
            f"{host}: got a non-local address without TLS. "
            "Give --tls-cert and --tls-key, or --no-tls on a trusted network."
        )
    location = f"grpc+{'tls' if tls else 'tcp'}://{f'[{host}]' if ':' in host else host}:{port}"
    fl = import_flight()

    class TokenMiddleware(fl.ServerMiddlewareFactory):  # type: ignore[name-defined,misc]  # no types
        """Refuses calls without the token."""

        def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
            given = (headers.get("authorization") or [""])[0]
            # compare_digest takes the same time for any wrong token
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise fl.FlightUnauthenticatedError("missing or wrong token")

    class Server(fl.FlightServerBase):  # type: ignore[name-defined,misc]  # no types
        """`do_get` streams chunks or documents, `do_put` adds a property, and actions do the rest."""

        def do_get(self, context: Any, ticket: Any) -> Any:
            tables = served.stream(ticket.ticket)
            # the schema must be known before the stream starts, and an early
            # error becomes the call's error
            first = translate_errors(lambda: next(tables))
            return fl.GeneratorStream(first.schema, stream_batches(first, tables))

        def do_action(self, context: Any, action: Any) -> list[bytes]:
            body = action.body.to_pybytes()
            answer = translate_errors(lambda: served.handle_action(action.type, body))
            return [json.dumps({"answer": answer}, default=str).encode()]

        def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            request = translate_errors(lambda: parse_request(descriptor.command))
            n = translate_errors(lambda: served.add_property(request, reader.read_all()))
            writer.write(json.dumps({"answer": n}).encode())

    with explain_errors(location, "Use another port, or 0."):
        middleware, certificates = {"gate": TokenMiddleware()}, [tls] if tls else None
        return Server(location, middleware=middleware, tls_certificates=certificates)
