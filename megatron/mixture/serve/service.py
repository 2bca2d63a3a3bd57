"""Server of mixtures over Arrow Flight, for clusters whose ranks cannot read the data.

A client names a mixture that the server was started with, and chunks by number. It receives Arrow and sends
JSON. Nothing that it sends is unpickled, executed, or used as a path. The content of a chunk follows from its
number, and from the mixture log on disk if weights follow a model. A server that was killed and started again
therefore returns the same chunks.
"""

import errno
import hmac
import json
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.mixture.adaptive import NotReadyError
from megatron.mixture.chunk import Position
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.lazy_imports import import_duckdb, import_flight
from megatron.mixture.seek import SeekDeadlineError
from megatron.mixture.serve.access import (
    check_token,
    format_address,
    is_loopback,
    make_socket_folder,
    strip_brackets,
)
from megatron.mixture.serve.catalog_protocol import MAX_REQUEST_BYTES
from megatron.mixture.serve.directory import MAX_DOMAINS, ServedDirectory
from megatron.mixture.serve.jobs import BusyError
from megatron.mixture.serve.metrics import MixtureCollector, ServerCounts, start_metrics_server
from megatron.mixture.serve.protocol import parse_report, parse_request
from megatron.mixture.serve.proxy import RequestProxy, make_tls_context

MAX_RUNS = 64  # per mixture and server process
MAX_ANSWERS = 256  # responses in progress; each keeps some MB in memory
# time limits of one request for the position of a chunk; the next request continues
NEAR_SEEK_S, SEEK_S = (0.1, 5.0)
REQUEST_BYTES, DOMAIN_BYTES = 1 << 14, 64  # per request, and per domain in a report (two numbers)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Address of a server and its access control.

    tls            certificate and key
    metrics_port   None: no metrics
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    tls: tuple[bytes, bytes] | None = None
    allow_plain: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None

    def check(self) -> None:
        """Raise ValueError for a non-local address without a token, or without TLS unless `allow_plain`.

        An invalid token raises too.
        """
        if self.token is not None:
            check_token(self.token, "--token-file", is_loopback(strip_brackets(self.host)))
        if is_loopback(strip_brackets(self.host)):
            return
        if self.token is None:
            raise ValueError(
                f"--host {self.host}: is not a local address. Add --token-file, or use 127.0.0.1."
            )
        if self.tls is None and not self.allow_plain:
            raise ValueError(
                f"--host {self.host}: is not a local address. "
                "Add --tls-cert and --tls-key, or --no-tls on a trusted network."
            )

    def check_ports_free(self) -> None:
        """Raise ValueError for a port in use: gRPC would report it later, and less clearly."""
        for host, port in ((self.host, self.port), (self.metrics_host, self.metrics_port)):
            if not port:
                continue
            try:
                addresses = socket.getaddrinfo(strip_brackets(host), port, type=socket.SOCK_STREAM)
                family, _, _, _, address = addresses[0]
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    # as servers set it: ports in TIME_WAIT are free
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(address)
                    probe.listen()
            except OSError as error:
                raise ValueError(
                    f"{format_address(host, port)}: cannot be listened on ({error.strerror}). Use another "
                    f"port, or 0."
                ) from error


def serve(
    mixtures: Sequence[Path] | Path, where: ListenOptions, seed: int, roots: Sequence[Path],
    on_ready: Callable[[int, int | None], None], follow: bool = False,
) -> None:  # fmt: skip
    """Serve until the process is stopped. `on_ready` is called with the ports of chunks and of metrics.

    mixtures   files of mixtures; or one folder with a catalog, see `ServedDirectory`
    roots      folders that must contain the files; empty: anywhere, as registered, and in a served folder
               only there
    follow     adaptive weights are computed by another server; read them from its log

    Raises ValueError as `ListenOptions` does.
    """
    where.check()
    where.check_ports_free()
    directory = ServedDirectory(mixtures, seed, roots) if isinstance(mixtures, Path) else None
    opened: dict[str, DocumentChunks] = {} if directory is None else directory.mixtures
    for path in () if isinstance(mixtures, Path) else mixtures:
        if path.stem in opened:
            raise ValueError(f"{path}: got two mixtures named {path.stem}. Rename one of the files.")
        opened[path.stem] = DocumentChunks(path, seed, run=None, roots=roots, follow=follow)
    handler = RequestHandler(opened, directory)
    with make_socket_folder() as folder:
        backend = Path(folder) / "flight"
        tls = make_tls_context(*where.tls, Path(folder)) if where.tls else None
        server = _make_server(handler, f"grpc+unix://{backend}", where.token)
        proxy = RequestProxy(
            backend,
            compute_request_limit(opened, directory),
            tls,
            lambda why: handler.counts.count_error("", why),
        )
        port = proxy.start(strip_brackets(where.host), where.port)
        metrics = None
        try:
            if where.metrics_port is not None:
                metrics = start_metrics_server(
                    strip_brackets(where.metrics_host), where.metrics_port, handler.counts.registry
                )
            on_ready(port, None if metrics is None else metrics.server_address[1])
            with _interrupt_on_sigterm():
                threading.Event().wait()  # Flight serves from its own threads
        finally:
            proxy.close()  # ends the responses in progress, for which shutdown would wait
            server.shutdown()
            if metrics is not None:
                # a thread that outlives the interpreter would keep DuckDB open, which prints a warning then
                metrics.shutdown()
                metrics.server_close()
            if directory is not None:
                directory.close()
            for source in [*handler.runs.values(), *opened.values()]:
                source.close()


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that the folder of sockets is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def compute_request_limit(
    mixtures: dict[str, DocumentChunks], directory: ServedDirectory | None = None
) -> int:
    """Return the bytes of the largest request that any of the mixtures needs, also of those to come."""
    n_domains = max((len(source.names) for source in mixtures.values()), default=0)
    if directory is None:
        return REQUEST_BYTES + DOMAIN_BYTES * n_domains
    return REQUEST_BYTES + max(MAX_REQUEST_BYTES, DOMAIN_BYTES * max(n_domains, MAX_DOMAINS))


class RequestHandler:
    """Transport-independent handler of the requests of clients. `client` identifies the caller."""

    def __init__(self, mixtures: dict[str, DocumentChunks], directory: ServedDirectory | None = None) -> None:
        """`directory`: receives the requests about its catalog, and adds and removes `mixtures`."""
        self.mixtures, self.counts, self.directory = mixtures, ServerCounts(), directory
        # the readers of a mixture share open files and a DuckDB connection
        self.locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self.runs: dict[tuple[str, str], DocumentChunks] = {}
        self.counts.registry.register(MixtureCollector(mixtures, self.runs))
        self._opening, self._seeking = threading.Lock(), threading.Lock()
        self.answer_slots = threading.BoundedSemaphore(MAX_ANSWERS)
        if directory is not None:
            directory.on_removed = self._close_mixture

    def stream_chunks(self, ticket: bytes, client: str) -> Iterator[Any]:
        """Yield Arrow tables, at least one, each read when it is requested.

        Raises ValueError for an invalid request. Raises NotReadyError if it precedes its losses, or if the
        computation of its position takes too long.
        """
        if self.directory is not None and b'"documents"' in ticket[:16]:
            yield from self.directory.stream_documents(ticket)
            return
        begin = time.perf_counter()
        request = parse_request(ticket, self.mixtures)
        source = self._open_run(request)
        known_to = source.distributor.weights.known_to
        if known_to is not None and request["first"] + request["n"] > known_to:
            source.settle(0)  # raises the error of a rule that failed
            # raises NotReadyError before anything is read
            source.distributor.weights.weights_at(request["first"] + request["n"] - 1)
        start = self._find_position(source, request["first"])
        pieces = source.read_tables(start, request["n"] if start.chunk == request["first"] else 0)
        n_rows, seconds = 0, time.perf_counter() - begin
        try:
            while True:
                begin = time.perf_counter()
                with self.locks[request["mixture"]]:
                    table = next(pieces, None)
                seconds += time.perf_counter() - begin
                if table is None:
                    return
                n_rows += len(table)
                yield table
        finally:
            self.counts.count_request(client, seconds, -(-n_rows // source.chunk_size), n_rows)

    def _find_position(self, source: DocumentChunks, chunk: int) -> Position:
        """Return the position of a chunk.

        Only one request at a time may compute for long, so that others are served meanwhile.
        """
        # most positions are found within NEAR_SEEK_S, without waiting for the lock below
        with suppress(SeekDeadlineError):
            return source.distributor.find_position(chunk, time.monotonic() + NEAR_SEEK_S)
        deadline = time.monotonic() + SEEK_S
        if not self._seeking.acquire(timeout=SEEK_S):
            raise NotReadyError("positions of other requests are being computed. Request the chunk again.")
        try:
            return source.distributor.find_position(chunk, deadline)
        finally:
            self._seeking.release()

    def handle_action(self, kind: str, body: bytes, client: str) -> dict[str, Any]:
        """Return the reply to describe, status, metrics, or a report. Raises ValueError for other actions."""
        if kind == "describe":
            return {name: self._describe_mixture(source) for name, source in dict(self.mixtures).items()}
        if kind == "status":
            return self.get_status()
        if kind == "metrics":
            return {"text": self.format_metrics()}
        if self.directory is not None and kind in self.directory.actions:
            return self.directory.handle(kind, body)
        if kind != "report":
            more = [] if self.directory is None else sorted(self.directory.actions)
            raise ValueError(
                f"action: expected {', '.join(['describe', 'status', 'metrics', 'report', *more])}."
            )
        report = parse_report(body, self.mixtures)
        is_accepted = self._open_run(report).report(report["chunk"], report["nats"], report["tokens"])
        self.counts.count_report(client)
        return {"taken": is_accepted}

    def get_status(self) -> dict[str, Any]:
        """Return the counters of the server."""
        counts = self.counts
        return {
            **counts.totals(),
            "clients": counts.count_clients(),
            "documents_per_s": counts.documents_per_s(), "uptime_s": counts.clock() - counts.start_time,
            "mixtures": sorted(self.mixtures),
            "runs": {f"{name}/{run}": source.distributor.weights.known_to
                     for (name, run), source in sorted(self.runs.items())},
        }  # fmt: skip

    def format_metrics(self) -> str:
        """Return the metrics as Prometheus text."""
        return self.counts.format_metrics()

    def _close_mixture(self, name: str, source: DocumentChunks) -> None:
        """Close a removed mixture and its runs, when no request is reading them."""
        with self.locks[name], self._opening:
            for key in [key for key in self.runs if key[0] == name]:
                self.runs.pop(key).close()
            source.close()

    def _describe_mixture(self, source: DocumentChunks) -> dict[str, Any]:
        description = {"identity": source.identity, "chunk_size": source.chunk_size, "domains": source.names}
        description["order"] = source.order
        every = None if source.spec.adaptive is None else source.spec.adaptive.every_steps
        return {**description, "at_once": source.at_once, "every": every}

    def _open_run(self, request: dict[str, Any]) -> DocumentChunks:
        """Return the chunks of a run. Its log is opened with its first request."""
        source = self.mixtures[request["mixture"]]
        if source.spec.adaptive is None:
            return source
        key = request["mixture"], request.get("run", "main")
        with self._opening:
            if key not in self.runs:
                if sum(name == key[0] for name, _ in self.runs) >= MAX_RUNS:
                    raise ValueError(f"{MAX_RUNS} runs are open already. Restart the server.")
                self.runs[key] = source.open_run(key[1])
            return self.runs[key]


def _make_server(handler: RequestHandler, location: str, token: str | None) -> Any:
    fl = import_flight()

    class TokenMiddleware(fl.ServerMiddlewareFactory):  # type: ignore[name-defined,misc]  # no types
        """Refuses calls without the token."""

        def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
            given = (headers.get("authorization") or [""])[0]
            # compare_digest takes the same time for any wrong token
            if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                handler.counts.count_error("", "token")
                raise fl.FlightUnauthenticatedError("missing or wrong token")

    class Server(fl.FlightServerBase):  # type: ignore[name-defined,misc]  # no types
        """Flight server: `do_get` returns chunks, and actions describe them or report losses."""

        def __init__(self) -> None:
            super().__init__(location, middleware={"gate": TokenMiddleware()})

        def do_get(self, context: Any, ticket: Any) -> Any:
            pieces = self._stream_tables(context, ticket.ticket)
            # the schema must be known before the stream starts, and an early error becomes the error of the
            # call
            first = next(pieces)
            return fl.GeneratorStream(first.schema, _iter_batches(first, pieces))

        def do_action(self, context: Any, action: Any) -> list[bytes]:
            body = action.body.to_pybytes()
            answer = self._translate_errors(
                context, lambda client: handler.handle_action(action.type, body, client)
            )
            return [json.dumps(answer).encode()]

        def _stream_tables(self, context: Any, ticket: bytes) -> Iterator[Any]:
            """Yield one response, which holds an answer slot until it is read or its client is gone."""
            if not handler.answer_slots.acquire(blocking=False):
                handler.counts.count_error(context.peer(), "busy")
                raise fl.FlightUnavailableError(
                    f"{MAX_ANSWERS} responses are unread. Read them, or try again."
                )
            try:
                pieces = self._translate_errors(context, lambda client: handler.stream_chunks(ticket, client))
                while True:
                    table = self._translate_errors(context, lambda _: next(pieces, None))
                    if table is None:
                        return
                    yield table
            finally:
                handler.answer_slots.release()

        def _translate_errors(self, context: Any, make: Callable[[str], Any]) -> Any:
            """Call `make`, and count and translate its errors to those of Flight."""
            try:
                return make(context.peer())
            except BusyError as error:
                handler.counts.count_error(context.peer(), "busy")
                raise fl.FlightUnavailableError(str(error)) from error
            except NotReadyError as error:
                handler.counts.count_error(context.peer(), "not yet")
                raise fl.FlightServerError(f"not yet: {error}") from error
            except (ValueError, OSError, import_duckdb().Error) as error:
                if isinstance(error, OSError) and error.errno in FULL_DISK:
                    handler.counts.count_error(context.peer(), "disk")
                    raise fl.FlightUnavailableError(f"the server's disk is full ({error})") from error
                handler.counts.count_error(context.peer(), "refused")
                # the first line: DuckDB adds the statement
                why = next(iter(str(error).splitlines()), type(error).__name__)
                raise fl.FlightServerError(f"refused: {why}") from error

    return Server()


def _iter_batches(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Yield the record batches of the tables.

    `rest` is closed with this generator: when it is exhausted, or when its client is gone.
    """
    try:
        yield from first.to_batches()
        for table in rest:
            yield from table.to_batches()
    finally:
        with suppress(Exception):
            rest.close()  # type: ignore[attr-defined]  # a generator
