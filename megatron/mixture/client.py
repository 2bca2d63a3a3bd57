"""Chunks of documents for training loops of any kind, from this machine's disks or from a server."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from megatron.mixture.libraries import flight
from megatron.mixture.tars import as_document

AT_ONCE_CHUNKS = 16  # read in one go
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0


@dataclass(frozen=True)
class Chunk:
    """Documents of one chunk: of each its domain (a place in `names` of the source), and text or token ids.

    A document of a tar is a dict: `__key__`, `text`, and the bytes of each member by its extension.

    identity   of the documents that all chunks together are made of
    """

    number: int
    identity: str
    domains: list[int]
    documents: list[Any]


class ChunkSource(Protocol):
    """What gives chunks: documents.DocumentChunks here, `RemoteChunks` elsewhere."""

    chunk_size: int
    identity: str
    names: tuple[str, ...]

    def read(self, first: int, n_chunks: int) -> Any:
        """An Arrow table: domain, and text or ids; fewer rows where the data end."""
        ...


class Connection:
    """A mixture server. ConnectionError where it stays away for `patience_s`."""

    def __init__(
        self, location: str, token: str | None = None, tls_roots: bytes | None = None,
        patience_s: float = 60.0,
    ) -> None:  # fmt: skip
        """location: grpc+tcp://host:port, or grpc+tls."""
        self.location, self.patience_s = location, patience_s
        self._tls_roots, self._client = tls_roots, None
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]

    def ask(self, action: str) -> dict[str, Any]:
        """What the server says to `describe` or `status`."""

        def asked(client: Any, options: Any) -> bytes:
            return next(iter(client.do_action(action, options))).body.to_pybytes()

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
                self._client = None
                if time.monotonic() + wait_s > until:
                    raise ConnectionError(
                        f"{self.location}: no answer for {self.patience_s:.0f} s; start the server again, "
                        "then go on from the last checkpoint"
                    ) from error
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except fl.FlightServerError as error:
                raise ValueError(f"{self.location}: {str(error).partition('. Detail:')[0]}") from error


class RemoteChunks:
    """The chunks of a mixture on a server; a lost connection is never taken for the end of the data."""

    def __init__(self, connection: Connection, mixture: str) -> None:
        """ValueError for a mixture that the server has not."""
        self.connection, self.mixture = connection, mixture
        told = connection.ask("describe")
        if mixture not in told:
            known = ", ".join(sorted(told))
            raise ValueError(f"{connection.location}: has no mixture '{mixture}', only {known}")
        self.identity, self.chunk_size = told[mixture]["identity"], told[mixture]["chunk_size"]
        self.names = tuple(told[mixture]["domains"])

    def read(self, first: int, n_chunks: int) -> Any:
        """As `ChunkSource`. ValueError for what the server refuses."""
        asked = {"mixture": self.mixture, "identity": self.identity, "first": first, "n": n_chunks}
        ticket = flight().Ticket(json.dumps(asked).encode())
        return self.connection.call(lambda client, options: client.do_get(ticket, options).read_all())


class MixtureDataset(IterableDataset):
    """The chunks of one data-parallel group: numbers group, group + n_groups, ... without end, or to the end.

    For a DataLoader with batch_size=None and any number of workers: the order is the same. Ranks of one group
    (tensor, pipeline, context) give the same `group` and see the same. `open_source` is called in the process
    that reads. The state is the next chunk of all groups together: it goes on with any number of groups.
    """

    def __init__(self, open_source: Callable[[], ChunkSource], group: int = 0, n_groups: int = 1) -> None:
        if not 0 <= group < n_groups:
            raise ValueError(f"group {group} of {n_groups}: wanted 0 to {n_groups - 1}")
        self.open_source, self.group, self.n_groups = open_source, group, n_groups
        self.next_chunk = 0
        self.identity: str | None = None

    def state_dict(self, consumed: Chunk | None = None) -> dict[str, Any]:
        """After training on `consumed` in every group; what was only fetched ahead does not count."""
        if consumed is None:
            return {"next_chunk": self.next_chunk, "identity": self.identity}
        rounds = consumed.number // self.n_groups + 1
        return {"next_chunk": rounds * self.n_groups, "identity": consumed.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, of any number of groups."""
        self.next_chunk, self.identity = state["next_chunk"], state["identity"]

    def __iter__(self) -> Iterator[Chunk]:
        source = self.open_source()
        if self.identity not in (None, source.identity):
            raise ValueError("the documents of the mixture have changed; begin anew, or bring them back")
        worker = get_worker_info()
        mine, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        number, step = self.next_chunk + self.group + mine * self.n_groups, self.n_groups * n_workers
        held: tuple[int, Any] | None = None
        while True:
            at_once = AT_ONCE_CHUNKS if step == 1 else 1
            if held is None or not held[0] <= number < held[0] + at_once:
                held = number, source.read(number, at_once)
            rows = held[1].slice((number - held[0]) * source.chunk_size, source.chunk_size)
            if len(rows) < source.chunk_size:
                return
            domains, documents = (rows.column(i).to_pylist() for i in (0, 1))
            if rows.column_names[1] == "sample":
                documents = [as_document(told) for told in documents]
            yield Chunk(number, source.identity, domains, documents)
            number += step
