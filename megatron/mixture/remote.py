"""Where chunks come from: what gives them, here or on a server, and is told what the model lost on them."""

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, Self

import numpy as np

from megatron.mixture.access import check_location
from megatron.mixture.adaptive import NotYetError
from megatron.mixture.libraries import flight

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
LOSSES_WAIT_S = 0.05  # between two questions for a chunk that waits for losses
NOT_YET = "not yet: "


class ChunkSource(Protocol):
    """What gives chunks: documents.DocumentChunks here, `RemoteChunks` elsewhere."""

    chunk_size: int
    identity: str
    names: tuple[str, ...]
    at_once: int  # chunks to read in one go; 1 where the next may wait for losses

    def read(self, first: int, n_chunks: int) -> Any:
        """An Arrow table: domain, and text or ids; fewer rows where the data end."""
        ...

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """What a model lost on a chunk: nats and tokens of each domain, float64 [K]. False where no weights
        follow from it."""
        ...


class Connection:
    """A mixture server. ConnectionError where it stays away for `patience_s`."""

    def __init__(
        self, location: str, token: str | None = None, tls_roots: bytes | None = None,
        patience_s: float = 60.0,
    ) -> None:  # fmt: skip
        """location: grpc+tcp://host:port, or grpc+tls. ValueError for another form."""
        check_location(location)
        self.location, self.patience_s = location, patience_s
        self._tls_roots, self._client = tls_roots, None
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; the next question connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def ask(self, action: str, told: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the server says to `describe`, `status`, `metrics` or a `report`."""
        body = b"" if told is None else json.dumps(told).encode()

        def asked(client: Any, options: Any) -> bytes:
            return next(iter(client.do_action((action, body), options))).body.to_pybytes()

        return json.loads(self.call(asked))

    def call(self, made: Callable[[Any, Any], Any]) -> Any:
        """The answer to made(client, options), which is made again while the connection is lost."""
        fl = flight()
        until, wait_s = time.monotonic() + self.patience_s, FIRST_WAIT_S
        while True:
            try:
                if self._client is None:
                    self._client = fl.connect(self.location, tls_root_certs=self._tls_roots)
                options = fl.FlightCallOptions(timeout=self.patience_s, headers=self._headers)
                return made(self._client, options)
            except fl.FlightUnauthenticatedError as error:
                raise ValueError(f"{self.location}: refuses the token; give the server's") from error
            except (fl.FlightUnavailableError, fl.FlightTimedOutError) as error:
                self.close()
                why = str(error).rpartition("last error: ")[2]
                if "handshake" in why:  # waiting would not help
                    raise ConnectionError(
                        f"{self.location}: its certificate is not trusted ({why.rpartition(': ')[2]}); "
                        "give it, or the authority's, as tls_roots (--tls-roots)"
                    ) from error
                if time.monotonic() + wait_s > until:
                    raise ConnectionError(
                        f"{self.location}: no answer for {self.patience_s:.0f} s ({why}); start the server "
                        "again, then go on from the last checkpoint"
                    ) from error
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except fl.FlightServerError as error:
                said = str(error).partition(". Detail:")[0]
                if NOT_YET in said:
                    raise NotYetError(f"{self.location}: {said}") from error
                raise ValueError(f"{self.location}: {said}") from error


class RemoteChunks:
    """The chunks of a mixture on a server; a lost connection is never taken for the end of the data.

    run   whose losses the weights follow, where they follow any
    """

    def __init__(self, connection: Connection, mixture: str, run: str = "main") -> None:
        """ValueError for a mixture that the server has not."""
        self.connection, self.mixture = connection, mixture
        told = connection.ask("describe")
        if mixture not in told:
            known = ", ".join(sorted(told))
            raise ValueError(f"{connection.location}: has no mixture '{mixture}', only {known}")
        self.identity, self.chunk_size = told[mixture]["identity"], told[mixture]["chunk_size"]
        self.names, self.at_once = tuple(told[mixture]["domains"]), told[mixture]["at_once"]
        self.every: int | None = told[mixture]["every"]
        self._names = {"mixture": mixture, "identity": self.identity}
        if self.every is not None:
            self._names["run"] = run

    def read(self, first: int, n_chunks: int) -> Any:
        """As `ChunkSource`. ValueError for what the server refuses, NotYetError for chunks whose weights
        are not found after `patience_s`."""
        ticket = flight().Ticket(json.dumps({**self._names, "first": first, "n": n_chunks}).encode())
        until = time.monotonic() + self.connection.patience_s
        while True:
            try:
                return self.connection.call(lambda client, options: client.do_get(ticket, options).read_all())
            except NotYetError:
                if time.monotonic() > until:
                    raise
                time.sleep(LOSSES_WAIT_S)

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """As `ChunkSource`; on the server's disk when this returns."""
        if self.every is None or chunk % self.every:
            return False
        told = {**self._names, "chunk": chunk, "nats": nats.tolist(), "tokens": tokens.tolist()}
        return self.connection.ask("report", told)["taken"]


class LossReports:
    """Sends losses from a thread of its own: training does not wait. For one process of each group."""

    def __init__(self, source: ChunkSource) -> None:
        self.source = source
        self._one = ThreadPoolExecutor(1, thread_name_prefix="mixture-losses")
        self._sent: list[Future[bool]] = []

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> None:
        """As `ChunkSource.report`, later. Raises what an earlier one raised."""
        for done in [sent for sent in self._sent if sent.done()]:
            self._sent.remove(done)
            done.result()
        self._sent.append(self._one.submit(self.source.report, chunk, nats.copy(), tokens.copy()))

    def close(self) -> None:
        """Wait until all are sent. Raises what one of them raised."""
        self._one.shutdown()
        for sent in self._sent:
            sent.result()
