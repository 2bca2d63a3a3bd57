"""Sources of chunks, local or on a server, which also receive the losses of the model."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, Self

import numpy as np

from megatron.mixture.adaptive import NotReadyError
from megatron.mixture.lazy_imports import import_flight
from megatron.mixture.serve.access import check_location

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
LOSSES_WAIT_S = 0.05  # between two requests for a chunk that waits for losses
# twin: the prefix of FlightServerError in service.py, by which these errors are recognized
NOT_YET = "not yet: "


class ChunkSource(Protocol):
    """Source of chunks: document_chunks.DocumentChunks locally, `RemoteChunks` from a server."""

    chunk_size: int
    identity: str
    names: tuple[str, ...]
    at_once: int  # chunks to read per call; 1 if the next chunk may wait for losses

    def read(self, first: int, n_chunks: int) -> Any:
        """Return an Arrow table with domain, and text or ids; fewer rows if the data end."""
        ...

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report the loss on a chunk: nats and tokens of each domain, float64 [K].

        Returns False if no weights follow from it.
        """
        ...


class Connection:
    """Connection to a mixture server. Raises ConnectionError after `patience_s` without a response."""

    def __init__(
        self, location: str, token: str | None = None, tls_roots: bytes | None = None,
        patience_s: float = 60.0,
    ) -> None:  # fmt: skip
        """location: grpc+tcp://host:port, or grpc+tls. Raises ValueError for another form."""
        check_location(location)
        self.location, self.patience_s = location, patience_s
        self._tls_roots, self._client = tls_roots, None
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next request connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def request(self, action: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the server's reply to `describe`, `status`, `metrics` or a `report`."""
        body = b"" if payload is None else json.dumps(payload).encode()

        def send(client: Any, options: Any) -> bytes:
            return next(iter(client.do_action((action, body), options))).body.to_pybytes()

        return json.loads(self.call(send))

    ask = request  # former name, kept for existing scripts

    def call(self, send: Callable[[Any, Any], Any]) -> Any:
        """Return the result of send(client, options), which is called again while the connection is lost."""
        fl = import_flight()
        until, wait_s = time.monotonic() + self.patience_s, FIRST_WAIT_S
        while True:
            try:
                if self._client is None:
                    self._client = fl.connect(self.location, tls_root_certs=self._tls_roots)
                # The same request may be sent twice: the content of a chunk follows from its number, and of
                # several reports of a chunk the first one counts.
                options = fl.FlightCallOptions(timeout=self.patience_s, headers=self._headers)
                return send(self._client, options)
            except fl.FlightUnauthenticatedError as error:
                raise ValueError(f"{self.location}: refused the token. Use the server's token.") from error
            except (fl.FlightUnavailableError, fl.FlightTimedOutError) as error:
                self.close()
                why = str(error).rpartition("last error: ")[2]
                if "handshake" in why:  # not temporary: fail without waiting
                    raise ConnectionError(
                        f"{self.location}: its certificate is not trusted ({why.rpartition(': ')[2]}). "
                        "Pass it, or that of its authority, as tls_roots (--tls-roots)."
                    ) from error
                # exponential backoff, without a wait beyond the deadline
                if time.monotonic() + wait_s > until:
                    raise ConnectionError(
                        f"{self.location}: no answer for {self.patience_s:.0f} s ({why}). Restart the "
                        "server, then resume from the last checkpoint."
                    ) from error
                time.sleep(wait_s)
                # 0.1, 0.2, 0.4, ... 3.2, then 5 s
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except fl.FlightServerError as error:
                # without the details of the connection that follow the message
                message = str(error).partition(". Detail:")[0]
                if NOT_YET in message:
                    raise NotReadyError(f"{self.location}: {message}") from error
                raise ValueError(f"{self.location}: {message}") from error


def encode_ticket(request: dict[str, Any]) -> Any:
    """Return a request for a stream of Arrow tables."""
    return import_flight().Ticket(json.dumps(request).encode())


class RemoteChunks:
    """Chunks of a mixture on a server. A lost connection is never reported as the end of the data.

    run   the run whose losses the weights follow, if they follow any
    """

    def __init__(self, connection: Connection, mixture: str, run: str = "main") -> None:
        """Describe the mixture. Raises ValueError if the server does not have it."""
        self.connection, self.mixture = connection, mixture
        mixtures = connection.request("describe")
        if mixture not in mixtures:
            available = ", ".join(sorted(mixtures))
            raise ValueError(f"{connection.location}: got mixture '{mixture}', expected one of {available}.")
        self.identity, self.chunk_size = mixtures[mixture]["identity"], mixtures[mixture]["chunk_size"]
        self.names, self.at_once = tuple(mixtures[mixture]["domains"]), mixtures[mixture]["at_once"]
        self.every: int | None = mixtures[mixture]["every"]
        # a server of an earlier version has none
        self.order: str | None = mixtures[mixture].get("order")
        self._names = {"mixture": mixture, "identity": self.identity}
        if self.every is not None:
            self._names["run"] = run

    def read(self, first: int, n_chunks: int) -> Any:
        """Read chunks, as `ChunkSource`.

        Raises ValueError for a request that the server refuses, and NotReadyError for chunks whose weights
        are not computed after `patience_s`.
        """
        ticket = encode_ticket({**self._names, "first": first, "n": n_chunks})
        # polled: the server replies at once, so that waiting clients occupy none of its threads
        until = time.monotonic() + self.connection.patience_s
        while True:
            try:
                return self.connection.call(lambda client, options: client.do_get(ticket, options).read_all())
            except NotReadyError:
                if time.monotonic() > until:
                    raise
                time.sleep(LOSSES_WAIT_S)

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report losses, as `ChunkSource`. They are on the server's disk when this returns."""
        if self.every is None or chunk % self.every:
            return False
        payload = {**self._names, "chunk": chunk, "nats": nats.tolist(), "tokens": tokens.tolist()}
        return self.connection.request("report", payload)["taken"]


class LossReports:
    """Background thread that sends losses, so that training does not wait. Use one per group."""

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        # one thread: reports arrive in the order of the chunks
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="mixture-losses")
        self._futures: list[Future[bool]] = []

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> None:
        """Queue losses for `ChunkSource.report`. Raises the error of an earlier report, if any."""
        # raise the error of a finished report to the caller
        for done in [future for future in self._futures if future.done()]:
            self._futures.remove(done)
            done.result()
        # copies, because the caller may reuse its arrays before the thread sends them
        self._futures.append(self._executor.submit(self.source.report, chunk, nats.copy(), tokens.copy()))

    def close(self) -> None:
        """Wait until all reports are sent. Raises the error of one of them, if any."""
        self._executor.shutdown()
        for future in self._futures:
            future.result()
