"""Client of a server's folder: register, query, and mix while the server runs.

with MixtureClient("grpc+tcp://127.0.0.1:8815", read_token(Path("data/token"))) as client:
    client.register("code", ["code/*.jsonl"], properties=["meta.language AS language category"])
    client.count(where=field("language").isin(["C", "Go"]), by=["language"])
    name = client.create_mixture({"by": ["language"], "weights": {"C": 1, "Go": 3}, "count": "documents"})
    for chunk in client.open_dataset(name, group=0, n_groups=8): ...
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self

from megatron.mixture.adaptive import NotReadyError
from megatron.mixture.catalog.catalog import CorpusSummary, RegistrationResult
from megatron.mixture.catalog.expression import Condition
from megatron.mixture.lazy_imports import import_flight
from megatron.mixture.serve.catalog_protocol import format_condition
from megatron.mixture.serve.client import MixtureDataset
from megatron.mixture.serve.remote import Connection, RemoteChunks, encode_ticket

FIRST_POLL_S, LONGEST_POLL_S = 0.05, 5.0
Where = str | Condition | Sequence[str | Condition]


class MixtureClient:
    """Connection to `tools/mixture_server.py DIR`.

    Requests are repeated while the server is started again or busy, at most `patience_s`. Errors of the
    server are a ValueError with its sentence.
    """

    def __init__(
        self, location: str, token: str | None = None, tls_roots: bytes | None = None,
        patience_s: float = 60.0,
    ) -> None:  # fmt: skip
        """location: grpc+tcp://host:port, or grpc+tls. Raises ValueError for another form."""
        self._options = location, token, tls_roots, patience_s
        self.connection = Connection(*self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def register(
        self, corpus: str, inputs: Sequence[str], properties: Sequence[str] = (), preset: str | None = None,
        text_key: str = "text", tokenizer: str | None = None, append_eod: bool = False,
        wait_s: float | None = None,
    ) -> RegistrationResult | None:  # fmt: skip
        """Register files of the server's machine, and wait for the end.

        inputs      files, folders and patterns below the server's roots; relative to its folder
        properties  'PATH AS name TYPE'; no SQL
        tokenizer   a folder or file below the roots; counts the tokens of each document
        wait_s      return None after this time, while the server continues; None: wait without limit

        The text is not sent. Called again, only new and changed files are registered.
        """
        request = {
            "corpus": corpus, "inputs": list(inputs), "properties": list(properties), "text_key": text_key,
            "append_eod": append_eod,
        }  # fmt: skip
        request |= {} if preset is None else {"preset": preset}
        request |= {} if tokenizer is None else {"tokenizer": tokenizer}
        result = self._run_job("register", request, wait_s)
        if result is None:
            return None
        return RegistrationResult(**{**result, "absent": tuple(result["absent"])})

    def list_corpora(self) -> list[CorpusSummary]:
        """Return the totals of every corpus."""
        corpora = self.connection.request("corpora")["corpora"]
        return [CorpusSummary(**{**corpus, "properties": tuple(corpus["properties"])}) for corpus in corpora]

    def describe_corpus(self, corpus: str) -> dict[str, list[tuple[Any, int, int | None]]]:
        """Return (value, documents, tokens) for each property, as `Catalog.describe_corpus`."""
        properties = self.connection.request("describe_corpus", {"corpus": corpus})["properties"]
        return {name: [tuple(row) for row in rows] for name, rows in properties.items()}

    def list_broken(self, corpus: str) -> list[tuple[str, int, str]]:
        """Return (file, line or row from 1, reason) of records that are not documents; at most 1,000."""
        return [tuple(row) for row in self.connection.request("broken", {"corpus": corpus})["broken"]]

    def remove_corpus(self, corpus: str) -> None:
        """Remove a corpus from the catalog. Its files stay, and mixtures that are open too."""
        self._run_job("remove_corpus", {"corpus": corpus}, None)

    def count(
        self, where: Where = (), by: Sequence[str] = (), corpora: Sequence[str] = (), tokens: bool = False,
        list_domains: str = "once",
    ) -> dict[tuple[Any, ...], tuple[int, int | None]]:  # fmt: skip
        """Return (documents, tokens) of each combination of the properties `by`.

        where   SQL over properties, or an expression of `field`s, or several, all of which must hold
        tokens  also count tokens; otherwise they are None
        """
        request = {"documents": _format_query(where, by, corpora, list_domains), "tokens": tokens}
        reply = self.connection.request("query", request)
        counts = zip(reply["documents"], reply["tokens"] or [None] * len(reply["documents"]), strict=True)
        return dict(zip(map(tuple, reply["domains"]), counts, strict=True))

    def find_documents(
        self, where: Where = (), by: Sequence[str] = (), corpora: Sequence[str] = (),
        list_domains: str = "once",
    ) -> Iterator[tuple[str, str, int]]:  # fmt: skip
        """Yield (domain, path on the server, row from 0) of the documents that satisfy a query."""
        ticket = encode_ticket({"documents": _format_query(where, by, corpora, list_domains)})
        reader = self.connection.call(lambda client, options: client.do_get(ticket, options))
        names: list[str] | None = None
        try:
            for piece in reader:
                names = names or piece.data.schema.metadata[b"domains"].decode().split("\n")
                rows = zip(*(column.to_pylist() for column in piece.data.columns), strict=True)
                yield from ((names[domain], path, row) for domain, path, row in rows)
        except import_flight().FlightError as error:
            message = str(error).partition(". Detail:")[0]
            raise ValueError(f"{self.connection.location}: {message}") from error

    def create_mixture(self, spec: dict[str, Any], name: str | None = None) -> str:
        """Create a mixture from the keys of a mixture file, without `catalog`, and return its name.

        name   default: a hash of the keys. The same keys give the same mixture, with the documents that it
               had when it was created.
        """
        conditions = spec.get("where", [])
        spec = {**spec, "where": _format_conditions(conditions)} if conditions else spec
        request = {"spec": spec} | ({} if name is None else {"name": name})
        result = self._run_job("create_mixture", request, None)
        assert result is not None, "without a limit the job has ended"
        return str(result["mixture"])

    def list_mixtures(self) -> list[str]:
        """Return the names of the mixtures."""
        return list(self.connection.request("mixtures")["mixtures"])

    def remove_mixture(self, name: str) -> None:
        """Remove a mixture. The logs of runs with adaptive weights stay on the server's disk."""
        self.connection.request("remove_mixture", {"mixture": name})

    def open_chunks(self, name: str, run: str = "main") -> RemoteChunks:
        """Return the chunks of a mixture, over a separate connection. Raises ValueError if it is not open."""
        failure = self.connection.request("mixtures")["failures"].get(name)
        if failure is not None:
            raise ValueError(f"{self.connection.location}: mixture '{name}' cannot be read: {failure}")
        return _open_chunks(self._options, name, run)

    def open_dataset(self, name: str, group: int = 0, n_groups: int = 1, run: str = "main") -> MixtureDataset:
        """Return the chunks of one data-parallel group. Workers of a DataLoader connect separately."""
        self.open_chunks(name, run).connection.close()
        return MixtureDataset(partial(_open_chunks, self._options, name, run), group, n_groups)

    def _run_job(self, action: str, request: dict[str, Any], wait_s: float | None) -> dict[str, Any] | None:
        """Start a job, and return its result; None after `wait_s`."""
        job, begin, poll_s = self.connection.request(action, request)["job"], time.monotonic(), FIRST_POLL_S
        while True:
            reply = self.connection.request("job", {"job": job})
            if reply["state"] == "unknown":
                # the server was started again, and a registration resumes where it was
                job = self.connection.request(action, request)["job"]
            if reply["state"] == "done":
                return dict(reply["result"])
            if reply["state"] == "failed":
                raise ValueError(f"{self.connection.location}: {reply['error']}")
            if wait_s is not None and time.monotonic() - begin > wait_s:
                return None
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LONGEST_POLL_S)


def _open_chunks(options: tuple[Any, ...], name: str, run: str) -> RemoteChunks:
    """Connect in the process that reads; a connection cannot be sent to a worker."""
    connection = Connection(*options)
    try:
        return RemoteChunks(connection, name, run)
    except (ValueError, NotReadyError):
        connection.close()
        raise


def _format_conditions(where: Where) -> list[str]:
    conditions = [where] if isinstance(where, str | Condition) else where
    return [format_condition(condition) for condition in conditions]


def _format_query(
    where: Where, by: Sequence[str], corpora: Sequence[str], list_domains: str
) -> dict[str, Any]:
    return {
        "where": _format_conditions(where), "by": list(by), "corpora": list(corpora),
        "list_domains": list_domains,
    }  # fmt: skip
