"""Token counts of texts."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from megatron.text.columns import concat_texts, iter_slices
from megatron.text.text_readers import check_texts
from megatron.tokenizer.encoder import (
    NO_EOD,
    Encoder,
    FastEncoder,
    LibraryEncoder,
    build_fast_bpe,
    encode_with_location,
)
from megatron.tokenizer.kinds import TokenizerSpec, load_tokenizer

BATCH_BYTES = 1 << 20  # text per task of a thread


class TokenCounter:
    """Count tokens in C++ on several threads if that is exact for the tokenizer, else with its library.

    settings   everything that the counts depend on, for JSON
    """

    def __init__(
        self, tokenizer: TokenizerSpec | str, append_eod: bool = False, special_text: bool = True,
        n_threads: int = 1,
    ) -> None:  # fmt: skip
        """`append_eod`: count an end token per text. `special_text`: as in PreprocessOptions.

        Raises the errors of loading the tokenizer.
        """
        loaded = load_tokenizer(tokenizer)
        fast, _ = build_fast_bpe(loaded)
        if fast is None:
            encoders: list[Encoder] = [LibraryEncoder(loaded, special_text)]  # it has its own threads
        else:
            # an encoder has a cache and buffers, so no
            # two threads may use the same one at a time
            encoders = [FastEncoder(fast, special_text) for _ in range(n_threads)]
        self._eod = loaded.eod_id if append_eod else NO_EOD
        self._idle: SimpleQueue[Encoder] = SimpleQueue()
        for encoder in encoders:
            self._idle.put(encoder)
        self._threads = ThreadPoolExecutor(len(encoders))
        self.settings: dict[str, Any] = {
            "name": loaded.name, "sha256": loaded.sha256, "append_eod": append_eod,
            "special_text": special_text,
        }  # fmt: skip

    def count_tokens(self, texts: Any, n_before: int = 0) -> np.ndarray:
        """Return the tokens of each text of an Arrow array of strings, int64.

        Raises ValueError for a text that cannot be encoded,
        with its number in the array, counted from n_before + 1.
        """
        if not len(texts):
            return np.zeros(0, dtype=np.int64)
        slices = ((n_before + first, part) for first, part in iter_slices(texts, BATCH_BYTES))
        parts = list(self._threads.map(self._count_part, *zip(*slices, strict=True)))
        return np.concatenate(parts).astype(np.int64)

    def _count_part(self, first: int, texts: Any) -> np.ndarray:
        encoder = self._idle.get()  # as many encoders as threads, so this never blocks
        try:
            joined = concat_texts(texts) if isinstance(encoder, FastEncoder) else None
            if isinstance(encoder, FastEncoder) and joined is not None:
                return encoder.encode_concatenated(*joined, self._eod)[1]
            return _count_individually(encoder, texts.to_pylist(), first, self._eod)
        finally:
            self._idle.put(encoder)


def _count_individually(encoder: Encoder, texts: Sequence[Any], first: int, eod: int) -> np.ndarray:
    """Count with the tokenizer's library, whose error does not contain which text has it."""
    locations = [f"document {first + i + 1}" for i in range(len(texts))]
    return encode_with_location(encoder, check_texts(texts, "text", locations), locations, eod)[1]
