"""Chunks from several sources that hold the same mixture: servers, or files that are read directly.

The content of a chunk follows from (documents, mixture, seed, chunk), so that any source may deliver it. If
one does not answer, the next one does, and the documents stay the same.

With weights that follow a model, one server owns the weights of a run, and the others follow its log
(tools/mixture_server.py --follow), which they must be able to read. Losses go to the owner: while it is down,
chunks are delivered as far as their weights are in the log.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron.log import get_logger
from megatron.mixture.serve.remote import ChunkSource, Connection, RemoteChunks

RETRY_S = 30.0  # after which a source that failed is tried again
PATIENCE_S = 5.0  # of a connection to one of several servers

log = get_logger(__name__)


def open_replicas(
    locations: Sequence[str], mixture: str, token: str | None = None, tls_roots: bytes | None = None,
    patience_s: float = PATIENCE_S, run: str = "main",
) -> "ReplicatedChunks":  # fmt: skip
    """Return the chunks of a mixture on several servers; the first one owns adaptive weights."""
    return ReplicatedChunks(
        [
            lambda location=location: RemoteChunks(  # type: ignore[misc]  # the default binds the variable
                Connection(location, token, tls_roots, patience_s), mixture, run
            )
            for location in locations
        ]
    )


class ReplicatedChunks:
    """Chunks from the sources that `openers` open, with the interface of `ChunkSource`.

    Chunks are requested from all sources in turn. A source that is lost (OSError) is replaced by the next one
    and tried again after RETRY_S.
    """

    def __init__(self, openers: Sequence[Callable[[], ChunkSource]]) -> None:
        """Open one source; the others are opened when they are needed.

        Raises ConnectionError if none can be opened.
        """
        self._openers = list(openers)
        self._sources: dict[int, ChunkSource] = {}
        self._failed: dict[int, float] = {}  # when a source was lost
        self._order: str | None = None
        first = self._call(0, lambda source: source)
        self.identity, self.chunk_size, self.names = first.identity, first.chunk_size, first.names
        self.at_once = first.at_once

    def read(self, first: int, n_chunks: int) -> Any:
        """Read chunks, as `ChunkSource`. Raises ConnectionError if no source delivers them."""
        return self._call(first // self.at_once, lambda source: source.read(first, n_chunks))

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report losses to the first source, as `ChunkSource`."""
        return self._open(0).report(chunk, nats, tokens)

    def _call(self, turn: int, use: Callable[[ChunkSource], Any]) -> Any:
        n, errors = len(self._openers), []
        places = [(turn + i) % n for i in range(n)]
        now = time.monotonic()
        # those that failed a short time ago come last
        places.sort(key=lambda place: now - self._failed.get(place, -RETRY_S) < RETRY_S)
        for place in places:
            try:
                result = use(self._open(place))
                self._failed.pop(place, None)
                return result
            except OSError as error:
                if place not in self._failed:
                    log.warning("a source of the mixture is lost, the next one is used: %s", error)
                self._sources.pop(place, None)
                self._failed[place] = time.monotonic()
                errors.append(str(error))
        raise ConnectionError(f"none of {n} sources of the mixture answers: {'; '.join(errors)}")

    def _open(self, place: int) -> ChunkSource:
        """Return an open source. Raises ValueError if it would deliver other chunks than the others."""
        source = self._sources.get(place)
        if source is None:
            source = self._openers[place]()
            order = getattr(source, "order", None)
            if self._order is None:
                self._order = order
            elif order != self._order:
                raise ValueError(
                    f"source {place + 1} of the mixture: has other documents, weights or another seed than "
                    "the first one. Start it with the same mixture, catalog and seed."
                )
            self._sources[place] = source
        return source
