"""Client of a mixture server: chunks for training, and registration, queries and mixtures."""

import json
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron.mixture.files import explain_errors, import_flight, import_pyarrow
from megatron.mixture.loaders import MixtureDataset
from megatron.mixture.registration import RegistrationResult
from megatron.mixture.weights import NotReadyError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
LOSSES_WAIT_S = 0.05  # between two requests for a chunk that waits for losses
NOT_YET = "not yet: "  # begin of the error for chunks whose losses are not reported
MAKE_TOKEN = "(umask 077 && openssl rand -hex 16 > token)"
REGISTRATION_S = 7 * 86_400.0  # limit of one registration

Where: TypeAlias = str | Sequence[str]


def check_private(path: Path) -> None:
    """Raise PermissionError if other users can read or write a file."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise PermissionError(
            f"{path}: got mode {mode:04o}, expected 0600: others can use the secret. "
            f"Run chmod 600 {path}, and make a new one if the machine is shared."
        )


def read_token(path: Path) -> str:
    """Return the token in a file of mode 0600. Raises PermissionError, or ValueError for an invalid token."""
    check_private(path)
    token = path.read_bytes().decode("latin-1").strip()
    # printable ASCII without spaces, as HTTP headers allow; 16 hexadecimal
    # digits have 64 bits
    if not re.fullmatch(r"[!-~]{16,}", token):
        raise ValueError(
            f"{path}: got {len(token)} characters, expected a printable word of at least 16. "
            f"Make one with {MAKE_TOKEN}."
        )
    return token


def make_token_file(folder: Path) -> Path:
    """Return the token file of a folder, created with a random token if it is missing."""
    path = folder / "token"
    if not path.exists():
        path.touch(0o600, exist_ok=False)
        path.write_text(secrets.token_hex(16) + "\n")
    return path


class MixtureClient(AbstractContextManager["MixtureClient"]):
    """Client that registers, queries, mixes and reads on a server; a context manager.

    Refused requests raise ValueError, and those
    without a response for `patience_s` ConnectionError.
    """

    def __init__(
        self, location: str, token: str | None = None, tls_roots: bytes | None = None,
        patience_s: float = 60.0,
    ) -> None:  # fmt: skip
        """location: grpc+tcp://host:port, or grpc+tls.

        A request to another form raises ValueError.
        """
        self.location, self.patience_s = location, patience_s
        self._tls_roots, self._client = tls_roots, None
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._arguments = location, token, tls_roots, patience_s

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the connection, which stays in its process."""
        return self.__dict__ | {"_client": None}

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. The next request connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def request(
        self, action: str, payload: dict[str, Any] | None = None, limit_s: float | None = None
    ) -> Any:
        """Return the server's reply to an action.

        limit_s   of the reply, if it may take longer than `patience_s`
        """
        body = b"" if payload is None else json.dumps(payload).encode()

        def send(client: Any, options: Any) -> bytes:
            return next(iter(client.do_action((action, body), options))).body.to_pybytes()

        return json.loads(self.call(send, limit_s))["answer"]

    def read(self, request: dict[str, Any]) -> Any:
        """Return the Arrow table that answers a request."""
        ticket = import_flight().Ticket(json.dumps(request).encode())
        # a connection that is lost within the answer is an error of the call,
        # which requests all of it again
        return self.call(lambda client, options: client.do_get(ticket, options).read_all())

    def call(self, send: Callable[[Any, Any], Any], limit_s: float | None = None) -> Any:
        """Return send(client, options), which is repeated while the connection is lost.

        It is also repeated while a chunk waits for losses: the server replies
        at once, so that waiting clients occupy none of its threads.
        """
        fl = import_flight()
        until, wait_s = time.monotonic() + self.patience_s, FIRST_WAIT_S
        # The same request may be sent twice:
        # the content of a chunk follows from its number,
        # and of several reports of a chunk the first one counts.
        options = fl.FlightCallOptions(timeout=limit_s or self.patience_s, headers=self._headers)
        while True:
            try:
                if self._client is None:
                    with explain_errors(self.location, "Write grpc+tcp://HOST:PORT or grpc+tls://HOST:PORT."):
                        self._client = fl.connect(self.location, tls_root_certs=self._tls_roots)
                return send(self._client, options)
            except fl.FlightUnauthenticatedError as error:
                raise ValueError(f"{self.location}: refused the token. Use the server's token.") from error
            except (fl.FlightUnavailableError, fl.FlightTimedOutError) as error:
                self.close()
                why = str(error).rpartition("last error: ")[2]
                # exponential backoff, without a wait beyond the deadline; a
                # refused handshake is not temporary
                if "handshake" in why or time.monotonic() + wait_s > until:
                    raise ConnectionError(
                        f"{self.location}: no answer for {self.patience_s:.0f} s ({why}). "
                        "Restart the server, and resume; for TLS, pass its certificate as tls_roots."
                    ) from error
                time.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except fl.FlightServerError as error:
                # without the details of the connection that follow the message
                message = str(error).partition(". Detail:")[0]
                if NOT_YET not in message:
                    raise ValueError(f"{self.location}: {message}") from error
                if time.monotonic() > until:
                    raise NotReadyError(f"{self.location}: {message}") from error
                time.sleep(LOSSES_WAIT_S)

    def register(
        self, corpus: str, inputs: Sequence[str], properties: Sequence[str] = (),
        preset: str | None = None, text_key: str = "text", tokenizer: str | None = None,
        append_eod: bool = False, limit_s: float = REGISTRATION_S,
    ) -> RegistrationResult:  # fmt: skip
        """Register files on the server, relative to its folder, and wait for the end.

        The text is not sent. Called again,
        only new and changed files are registered.
        """
        request = {
            "corpus": corpus, "inputs": list(inputs), "properties": list(properties),
            "text_key": text_key, "preset": preset, "tokenizer": tokenizer,
            "append_eod": append_eod,
        }  # fmt: skip
        return RegistrationResult(**self.request("register", request, limit_s))

    def add_property(self, corpus: str, prop: str, values: Path | str) -> int:
        """Add a property ('NAME TYPE') to the documents of a corpus from a local parquet file.

        values   columns path and row,
                 as `find_documents` returns them, and NAME

        Returns the number of documents with a row.
        """
        rows, fl = import_pyarrow().parquet.read_table(values), import_flight()
        command = json.dumps({"corpus": corpus, "property": prop}).encode()
        descriptor = fl.FlightDescriptor.for_command(command)

        def send(client: Any, options: Any) -> bytes:
            writer, reader = client.do_put(descriptor, rows.schema, options)
            with writer:
                writer.write_table(rows)
                writer.done_writing()
                return reader.read().to_pybytes()

        return int(json.loads(self.call(send))["answer"])

    def count(
        self, where: Where = (), by: Sequence[str] = (), corpora: Sequence[str] = (),
        tokens: bool = False,
    ) -> dict[tuple[Any, ...], tuple[int, int | None]]:  # fmt: skip
        """Return (documents, tokens) of each combination of the properties `by`.

        where   SQL over properties; of several conditions, all must hold
        tokens  also count tokens; otherwise they are None
        """
        query = {"where": where, "by": by, "corpora": corpora}
        reply = self.request("count", {"query": query, "tokens": tokens})
        return {tuple(domain): (n_documents, n_tokens) for domain, n_documents, n_tokens in reply}

    def find_documents(
        self, where: Where = (), by: Sequence[str] = (), corpora: Sequence[str] = ()
    ) -> Iterator[tuple[str, str, int]]:  # fmt: skip
        """Yield (domain, path on the server, row from 0) of the documents of a query."""
        answer = self.read({"query": {"where": where, "by": by, "corpora": corpora}})
        for piece in answer.to_batches():
            yield from zip(*(column.to_pylist() for column in piece.columns), strict=True)

    def create_mixture(self, spec: dict[str, Any]) -> str:
        """Create a mixture from the keys of a mixture file, and return its name.

        The name is a hash of the keys: the same keys give the same mixture,
        with the documents that it had when it was created.
        """
        return str(self.request("create_mixture", {"spec": spec}))

    def open_chunks(self, name: str, run: str = "main") -> "RemoteChunks":
        """Return the chunks of a mixture, over a separate connection."""
        return RemoteChunks(MixtureClient(*self._arguments), name, run)

    def open_dataset(
        self, name: str, group: int = 0, n_groups: int = 1, run: str = "main",
        parse: Callable[[Any], Any] | None = None,
    ) -> MixtureDataset:  # fmt: skip
        """Return the chunks of one data-parallel group.

        Workers of a DataLoader connect separately.
        """
        self.open_chunks(name, run).close()  # an unknown mixture is an error here
        # called in the process that reads:
        # a connection cannot be sent to a worker
        return MixtureDataset(partial(self.open_chunks, name, run), group, n_groups, parse)


class RemoteChunks:
    """Chunks of a mixture on a server. A lost connection is not the end of the data.

    run   the run whose losses the weights follow, if they follow any
    """

    def __init__(self, client: MixtureClient, mixture: str, run: str = "main") -> None:
        """Describe the mixture.

        Raises ValueError if the server does not have it.
        """
        self.client = client
        meta = client.request("describe", {"mixture": mixture, "run": run})
        self.identity, self.chunk_size = meta["identity"], meta["chunk_size"]
        self.names, self.at_once = tuple(meta["domains"]), meta["at_once"]
        self._names = {"mixture": mixture, "identity": self.identity, "run": run}

    def read(self, first: int, n_chunks: int, position: dict[str, Any] | None = None) -> Any:
        """Read chunks, as `ChunkSource`.

        Raises ValueError for a request that the server refuses, and
        NotReadyError for chunks whose weights are not computed after
        `patience_s`.
        """
        request = {**self._names, "first": first, "n": n_chunks, "position": position}
        return self.client.read(request)

    def find_position(self, chunk: int, position: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the position before a chunk, as `ChunkSource`."""
        request = {**self._names, "chunk": chunk, "position": position}
        return dict(self.client.request("position", request))

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report losses, as `ChunkSource`.

        They are on the server's disk when this returns.
        """
        losses = {"nats": nats.tolist(), "tokens": tokens.tolist()}
        return bool(self.client.request("report", {**self._names, "chunk": chunk, **losses}))

    def close(self) -> None:
        """Close the connection."""
        self.client.close()
