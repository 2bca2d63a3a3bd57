"""How many tokens each text has."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from megatron.data.columns import joined_text
from megatron.data.documents import checked_text
from megatron.tokenizer.encoder import NO_EOD, Encoder, FastEncoder, LibraryEncoder, fast_of
from megatron.tokenizer.kinds import TokenizerSpec, load

BATCH_BYTES = 1 << 20  # of text that a thread encodes at a time


class TokenCounter:
    """Counts by a tokenizer: in C++ on some threads where that is exact, else through its library.

    told   what the counts depend on, for JSON
    """

    def __init__(
        self, tokenizer: TokenizerSpec | str, append_eod: bool = False, special_text: bool = True,
        n_threads: int = 1,
    ) -> None:  # fmt: skip
        """`append_eod`: an end counts with each text. `special_text`: as preprocess.Options has it.

        Raises what loading the tokenizer raises.
        """
        known = load(tokenizer)
        fast, _ = fast_of(known)
        if fast is None:
            encoders: list[Encoder] = [LibraryEncoder(known, special_text)]  # it has threads of its own
        else:
            encoders = [FastEncoder(fast, special_text) for _ in range(n_threads)]
        self._eod = known.eod_id if append_eod else NO_EOD
        self._idle: SimpleQueue[Encoder] = SimpleQueue()
        for encoder in encoders:
            self._idle.put(encoder)
        self._threads = ThreadPoolExecutor(len(encoders))
        self.told: dict[str, Any] = {
            "name": known.name, "sha256": known.sha256, "append_eod": append_eod,
            "special_text": special_text,
        }  # fmt: skip

    def lengths(self, texts: Any, n_before: int = 0) -> np.ndarray:
        """Tokens of each text of an Arrow array of strings, int64. ValueError for one that cannot be encoded.

        It says which by its place in the array, counted from n_before + 1.
        """
        if not len(texts):
            return np.zeros(0, dtype=np.int64)
        parts = list(self._threads.map(self._count, *zip(*_parts_of(texts, n_before), strict=True)))
        return np.concatenate(parts).astype(np.int64)

    def _count(self, first: int, texts: Any) -> np.ndarray:
        encoder = self._idle.get()
        try:
            joined = joined_text(texts) if isinstance(encoder, FastEncoder) else None
            if isinstance(encoder, FastEncoder) and joined is not None:
                return encoder.encode_joined(*joined, self._eod)[1]
            return _one_by_one(encoder, texts.to_pylist(), first, self._eod)
        finally:
            self._idle.put(encoder)


def _parts_of(texts: Any, n_before: int) -> Iterator[tuple[int, Any]]:
    """(place of the first, some texts) that are about BATCH_BYTES together."""
    joined = joined_text(texts)
    ends = np.cumsum(np.ones(len(texts)) * 1024) if joined is None else joined[1]
    begin = 0
    while begin < len(texts):
        base = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, base + BATCH_BYTES, side="right")))
        yield n_before + begin, texts.slice(begin, end - begin)
        begin = end


def _one_by_one(encoder: Encoder, texts: Sequence[Any], first: int, eod: int) -> np.ndarray:
    try:
        return encoder.encode([checked_text(text, "text") for text in texts], eod)[1]
    except ValueError:  # of which text the library does not say
        for i, text in enumerate(texts):
            try:
                encoder.encode([checked_text(text, "text")], eod)
            except ValueError as error:
                raise ValueError(f"document {first + i + 1}: {error}") from error
        raise
