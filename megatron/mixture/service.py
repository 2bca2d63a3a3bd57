"""A server of mixtures, for clusters whose ranks do not see the data: Arrow Flight.

A client names a mixture that the server was started with, and chunks by number; it gets Arrow, and sends
JSON. Nothing it sends is unpickled, executed, or used as a path. What a chunk holds follows from its number,
and from the mixture log on disk where weights follow a model, so that a server that was killed and started
again gives what the first would have given.
"""

import errno
import hmac
import json
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.mixture.access import check_token, format_address, is_loopback, plain_host
from megatron.mixture.adaptive import NotYetError
from megatron.mixture.chunk import Position
from megatron.mixture.documents import DocumentChunks
from megatron.mixture.front import Front, tls_context
from megatron.mixture.libraries import duckdb, flight
from megatron.mixture.metrics import Sample, ServerCounts, listen
from megatron.mixture.seek import SeekDeadlineError

MOST_CHUNKS = 1024  # of one request
MOST_RUNS = 64  # of one mixture, in one life of a server
MOST_BYTES = 1 << 20  # of a request's JSON
MOST_ANSWERS = 256  # that clients have not read to the end: each holds some MB
NEAR_SEEK_S, SEEK_S = 0.1, 5.0  # for one request, to find the position of a chunk; the next request continues
REQUEST_BYTES, DOMAIN_BYTES = 1 << 14, 64  # of any request, and of a domain's two numbers in a report
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REQUEST_KEYS = {"mixture", "identity", "first", "n"}
REPORT_KEYS = {"mixture", "identity", "chunk", "nats", "tokens"}
MAY_HAVE = {"run"}
LARGEST = 1 << 40  # chunk number


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens, and to whom. `tls`: certificate and key; `metrics_port` None: no metrics."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    tls: tuple[bytes, bytes] | None = None
    allow_plain: bool = False
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None

    def check(self) -> None:
        """ValueError for an address beyond this machine without a token, or TLS unless `allow_plain`, and for
        a token that is none."""
        if self.token is not None:
            check_token(self.token, "--token-file", is_loopback(plain_host(self.host)))
        if is_loopback(plain_host(self.host)):
            return
        if self.token is None:
            raise ValueError(
                f"--host {self.host}: is beyond this machine; give --token-file, or use 127.0.0.1"
            )
        if self.tls is None and not self.allow_plain:
            raise ValueError(
                f"--host {self.host}: give --tls-cert and --tls-key, or --no-tls if it is trusted"
            )

    def check_free(self) -> None:
        """ValueError for a port that another has: gRPC would tell it late, and in words of its own."""
        for host, port in ((self.host, self.port), (self.metrics_host, self.metrics_port)):
            if not port:
                continue
            try:
                known = socket.getaddrinfo(plain_host(host), port, type=socket.SOCK_STREAM)
                family, _, _, _, address = known[0]
                with socket.socket(family, socket.SOCK_STREAM) as tried:
                    tried.setsockopt(
                        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                    )  # as servers do: see TIME_WAIT
                    tried.bind(address)
                    tried.listen()
            except OSError as error:
                raise ValueError(
                    f"{format_address(host, port)}: cannot be listened on ({error.strerror}); give another "
                    f"port, or 0"
                ) from error


def serve(
    mixtures: Sequence[Path], where: Listening, seed: int, roots: Sequence[Path],
    ready: Callable[[int, int | None], None],
) -> None:  # fmt: skip
    """Serve until the process is ended. `ready` is told the ports, of chunks and of metrics.

    `roots`: where files may lie; none: anywhere, as registered. ValueError as `Listening` raises.
    """
    where.check()
    where.check_free()
    opened: dict[str, DocumentChunks] = {}
    for path in mixtures:
        if path.stem in opened:
            raise ValueError(f"{path}: two mixtures are named {path.stem}; rename one")
        opened[path.stem] = DocumentChunks(path, seed, run=None, roots=roots)
    desk = Desk(opened)
    with tempfile.TemporaryDirectory(prefix="mixture-", ignore_cleanup_errors=True) as folder:
        backend = Path(folder) / "flight"
        tls = tls_context(*where.tls, Path(folder)) if where.tls else None
        server = _server(desk, f"grpc+unix://{backend}", where.token)
        front = Front(backend, largest_request(opened), tls, lambda why: desk.counts.error("", why))
        port = front.start(plain_host(where.host), where.port)
        metrics = None
        try:
            if where.metrics_port is not None:
                metrics = listen(plain_host(where.metrics_host), where.metrics_port, desk.exposition)
            ready(port, None if metrics is None else metrics.server_address[1])
            with _sigterm_as_interrupt():
                threading.Event().wait()  # Flight answers in threads of its own
        finally:
            front.close()  # ends the answers in progress, for which the next line would wait
            server.shutdown()
            if metrics is not None:
                # a thread that outlives the interpreter would hold DuckDB, which then complains on the
                # terminal
                metrics.shutdown()
                metrics.server_close()
            for one in [*desk.runs.values(), *opened.values()]:
                one.close()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A SIGTERM ends as Ctrl-C does, so that the folder of sockets does not stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def largest_request(mixtures: dict[str, DocumentChunks]) -> int:
    """Bytes of the largest request that any of the mixtures needs."""
    return REQUEST_BYTES + DOMAIN_BYTES * max((len(one.names) for one in mixtures.values()), default=0)


class Desk:
    """Answers what clients ask; knows no wire. `context` of every question: who asks."""

    def __init__(self, mixtures: dict[str, DocumentChunks]) -> None:
        self.mixtures, self.counts = mixtures, ServerCounts()
        self.locks = {name: threading.Lock() for name in mixtures}
        self.runs: dict[tuple[str, str], DocumentChunks] = {}
        self._opening, self._seeking = threading.Lock(), threading.Lock()
        self.answers = threading.BoundedSemaphore(MOST_ANSWERS)

    def chunks(self, ticket: bytes, client: str) -> Iterator[Any]:
        """Arrow tables, at least one, each read when it is requested. ValueError for what is no request,
        NotYetError where it comes before its losses or its position takes time to compute."""
        begin = time.perf_counter()
        asked = read_request(ticket, self.mixtures)
        source = self._of_run(asked)
        known_to = source.distributor.weights.known_to
        if known_to is not None and asked["first"] + asked["n"] > known_to:
            source.settle(0)  # tells of a rule that failed
            source.distributor.weights.at(asked["first"] + asked["n"] - 1)
        start = self._seek(source, asked["first"])
        pieces = source.read_pieces(start, asked["n"] if start.chunk == asked["first"] else 0)
        n_rows, seconds = 0, time.perf_counter() - begin
        try:
            while True:
                begin = time.perf_counter()
                with self.locks[asked["mixture"]]:
                    table = next(pieces, None)
                seconds += time.perf_counter() - begin
                if table is None:
                    return
                n_rows += len(table)
                yield table
        finally:
            self.counts.request(client, seconds, -(-n_rows // source.chunk_size), n_rows)

    def _seek(self, source: DocumentChunks, chunk: int) -> Position:
        """The position of a chunk. One request at a time computes for long: others are served meanwhile."""
        with suppress(SeekDeadlineError):
            return source.distributor.position(chunk, time.monotonic() + NEAR_SEEK_S)
        deadline = time.monotonic() + SEEK_S
        if not self._seeking.acquire(timeout=SEEK_S):
            raise NotYetError("positions of other requests are being computed. Request the chunk again.")
        try:
            return source.distributor.position(chunk, deadline)
        finally:
            self._seeking.release()

    def act(self, kind: str, body: bytes, client: str) -> dict[str, Any]:
        """The answer to describe, status, metrics, or a report. ValueError for anything else."""
        if kind == "describe":
            return {name: self._told(one) for name, one in self.mixtures.items()}
        if kind == "status":
            return self.status()
        if kind == "metrics":
            return {"text": self.exposition()}
        if kind != "report":
            raise ValueError("the actions are describe, status, metrics and report")
        asked = read_report(body, self.mixtures)
        taken = self._of_run(asked).report(asked["chunk"], asked["nats"], asked["tokens"])
        self.counts.report(client)
        return {"taken": taken}

    def status(self) -> dict[str, Any]:
        """How the server is, in numbers."""
        counts = self.counts
        return {
            "requests": counts.requests, "chunks": counts.chunks, "documents": counts.documents,
            "reports": counts.reports, "errors": sum(counts.errors.values()), "clients": counts.clients(),
            "documents_per_s": counts.documents_per_s(), "uptime_s": counts.clock() - counts.since,
            "mixtures": sorted(self.mixtures),
            "runs": {f"{name}/{run}": one.distributor.weights.known_to
                     for (name, run), one in sorted(self.runs.items())},
        }  # fmt: skip

    def exposition(self) -> str:
        """The metrics, for Prometheus."""
        held: list[Sample] = []
        weights: list[Sample] = []
        known: list[Sample] = []
        for name, one in self.mixtures.items():
            of_domains = zip(one.names, one.counts.tolist(), strict=True)
            held += [({"mixture": name, "domain": domain}, n) for domain, n in of_domains]
        runs = dict(self.runs)
        static = {(name, ""): one for name, one in self.mixtures.items() if one.spec.adaptive is None}
        for (name, run), one in (static | runs).items():
            labels = {"mixture": name, "run": run}
            known_to = one.distributor.weights.known_to
            now = one.distributor.weights.at(0 if known_to is None else known_to - 1)[0]
            shares = zip(one.names, (now / now.sum()).tolist(), strict=True)
            weights += [({**labels, "domain": domain}, share) for domain, share in shares]
            if known_to is not None:
                known.append((labels, known_to))
        return self.counts.exposition(
            [
                ("catalog_documents", "documents of a mixture's domains", held),
                (
                    "weight",
                    "weight of a domain: the latest where it follows a model, else the first",
                    weights,
                ),
                ("known_chunks", "chunks whose weights are found", known),
            ]
        )

    def _told(self, one: DocumentChunks) -> dict[str, Any]:
        told = {"identity": one.identity, "chunk_size": one.chunk_size, "domains": one.names}
        every = None if one.spec.adaptive is None else one.spec.adaptive["every_steps"]
        return {**told, "at_once": one.at_once, "every": every}

    def _of_run(self, asked: dict[str, Any]) -> DocumentChunks:
        """The chunks of a run; its log is opened when it is first asked for."""
        source = self.mixtures[asked["mixture"]]
        if source.spec.adaptive is None:
            return source
        key = asked["mixture"], asked.get("run", "main")
        with self._opening:
            if key not in self.runs:
                if sum(name == key[0] for name, _ in self.runs) >= MOST_RUNS:
                    raise ValueError(f"{MOST_RUNS} runs are open; start the server anew")
                self.runs[key] = source.of_run(key[1])
            return self.runs[key]


def _server(desk: Desk, location: str, token: str | None) -> Any:
    fl = flight()

    class Gate(fl.ServerMiddlewareFactory):
        """Lets in who knows the token."""

        def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
            given = (headers.get("authorization") or [""])[0]
            if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                desk.counts.error("", "token")
                raise fl.FlightUnauthenticatedError("no or wrong token")

    class Server(fl.FlightServerBase):
        """`do_get` gives chunks; the actions tell about them, and take reports."""

        def __init__(self) -> None:
            super().__init__(location, middleware={"gate": Gate()})

        def do_get(self, context: Any, ticket: Any) -> Any:
            pieces = self._pieces(context, ticket.ticket)
            first = next(pieces)
            return fl.GeneratorStream(first.schema, _chain(first, pieces))

        def do_action(self, context: Any, action: Any) -> list[bytes]:
            body = action.body.to_pybytes()
            told = self._answer(context, lambda client: desk.act(action.type, body, client))
            return [json.dumps(told).encode()]

        def _pieces(self, context: Any, ticket: bytes) -> Iterator[Any]:
            """One answer, counted among those in progress until it is read or its client is gone."""
            if not desk.answers.acquire(blocking=False):
                desk.counts.error(context.peer(), "busy")
                raise fl.FlightUnavailableError(f"{MOST_ANSWERS} answers are unread; read them, or ask again")
            try:
                pieces = self._answer(context, lambda client: desk.chunks(ticket, client))
                while True:
                    table = self._answer(context, lambda _: next(pieces, None))
                    if table is None:
                        return
                    yield table
            finally:
                desk.answers.release()

        def _answer(self, context: Any, make: Callable[[str], Any]) -> Any:
            try:
                return make(context.peer())
            except NotYetError as error:
                desk.counts.error(context.peer(), "not yet")
                raise fl.FlightServerError(f"not yet: {error}") from error
            except (ValueError, OSError, duckdb().Error) as error:
                if isinstance(error, OSError) and error.errno in FULL_DISK:
                    desk.counts.error(context.peer(), "disk")
                    raise fl.FlightUnavailableError(f"the server's disk is full ({error})") from error
                desk.counts.error(context.peer(), "refused")
                raise fl.FlightServerError(f"refused: {error}") from error

    return Server()


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Record batches of the tables. `rest` is closed with it: when it is read, or its client is gone."""
    try:
        yield from first.to_batches()
        for table in rest:
            yield from table.to_batches()
    finally:
        with suppress(Exception):
            rest.close()  # type: ignore[attr-defined]  # a generator


def read_request(ticket: bytes, mixtures: dict[str, DocumentChunks]) -> dict[str, Any]:
    """What a ticket asks for: {mixture, identity, first, n}, perhaps run. ValueError for anything else."""
    asked = _read(ticket, REQUEST_KEYS, mixtures)
    for key, most in (("first", LARGEST), ("n", MOST_CHUNKS)):
        _check_number(asked, key, most)
    return asked


def read_report(body: bytes, mixtures: dict[str, DocumentChunks]) -> dict[str, Any]:
    """What a client lost on a chunk: {mixture, identity, chunk, nats, tokens}, perhaps run; the last two as
    float64 [K]. ValueError for anything else."""
    told = _read(body, REPORT_KEYS, mixtures)
    _check_number(told, "chunk", LARGEST)
    for key in ("nats", "tokens"):
        try:
            told[key] = np.array(told[key], dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{key}: a list of numbers") from None
    return told


def _read(content: bytes, keys: set[str], mixtures: dict[str, DocumentChunks]) -> dict[str, Any]:
    try:
        asked = json.loads(content) if len(content) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        raise ValueError("a request is JSON") from None
    if not isinstance(asked, dict) or set(asked) - MAY_HAVE != keys:
        raise ValueError(f"a request has the keys {', '.join(sorted(keys))}")
    if not isinstance(asked["mixture"], str) or asked["mixture"] not in mixtures:
        raise ValueError(f"no such mixture; there are {', '.join(sorted(mixtures))}")
    if not isinstance(asked.get("run", ""), str):
        raise ValueError("run: a name")
    if asked["identity"] != mixtures[asked["mixture"]].identity:
        raise ValueError("the documents of the mixture have changed; begin anew, or bring them back")
    return asked


def _check_number(asked: dict[str, Any], key: str, most: int) -> None:
    if type(asked[key]) is not int or not 0 <= asked[key] <= most:
        raise ValueError(f"{key} is a number from 0 to {most}")
