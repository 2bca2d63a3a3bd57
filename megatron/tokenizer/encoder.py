"""Texts to ids: through C++ where that is exact, else through the tokenizer's own library."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from megatron import _csrc
from megatron.tokenizer.bpe import GPT2_EOD, BpeTokenizer, Gpt2Tokenizer
from megatron.tokenizer.fast_bpe import FastBpe, compile_fast, compile_gpt2
from megatron.tokenizer.kinds import Tokenizer

NO_EOD = -1


class Encoder(Protocol):
    """Encodes for one thread. Ids are np.uint32 [all tokens], lengths int32 [texts]."""

    def encode(self, texts: Sequence[str], eod: int = NO_EOD) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the texts end to end, each followed by `eod` unless that is NO_EOD, and their lengths."""
        ...


class FastEncoder:
    """The C++ one. `special`: the special token's text within a text becomes its id."""

    def __init__(self, fast: FastBpe, special: bool = True) -> None:
        self.worker: Any = fast.worker()
        self.special = special

    def encode(self, texts: Sequence[str], eod: int = NO_EOD) -> tuple[np.ndarray, np.ndarray]:
        raw = [text.encode() for text in texts]
        ends = np.cumsum([len(one) for one in raw], dtype=np.int64)
        return self.encode_joined(np.frombuffer(b"".join(raw), dtype=np.uint8), ends, eod)

    def encode_joined(
        self, texts: np.ndarray, ends: np.ndarray, eod: int = NO_EOD
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `encode`, for texts uint8 as UTF-8 laid end to end, text i ending at byte ends[i], int64."""
        return _csrc.encode_texts(self.worker, texts, ends, self.special, eod)


class LibraryEncoder:
    """The tokenizer's own library."""

    def __init__(self, tokenizer: Tokenizer, special: bool = True) -> None:
        self.tokenizer = tokenizer
        if not isinstance(tokenizer, BpeTokenizer):
            return  # the other kinds take every text for text
        # the library then leaves the special token's text to the pre-tokeniser, like any other text
        tokenizer.inner.encode_special_tokens = not special

    def encode(self, texts: Sequence[str], eod: int = NO_EOD) -> tuple[np.ndarray, np.ndarray]:
        tail = [] if eod == NO_EOD else [eod]
        found = [ids + tail for ids in self.tokenizer.encode_batch(texts)]
        lengths = np.array([len(ids) for ids in found], dtype=np.int32)
        return np.array([i for ids in found for i in ids], dtype=np.uint32), lengths


def encode_or_blame(
    encoder: Encoder, texts: Sequence[str], places: Sequence[str], eod: int = NO_EOD
) -> tuple[np.ndarray, np.ndarray]:
    """As `encode`; the ValueError of a text that cannot be encoded begins with its place."""
    try:
        return encoder.encode(texts, eod)
    except ValueError:
        for text, place in zip(texts, places, strict=True):
            try:
                encoder.encode([text], eod)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        raise


def fast_of(tokenizer: Tokenizer) -> tuple[FastBpe | None, str]:
    """The C++ encoder of a tokenizer, or None and the reason why there is none."""
    if not isinstance(tokenizer, BpeTokenizer):
        return None, f"it is a {type(tokenizer).__name__} tokenizer"
    if isinstance(tokenizer, Gpt2Tokenizer):
        return compile_gpt2(tokenizer.merge_lines(), GPT2_EOD.token, GPT2_EOD.id), ""
    return compile_fast(tokenizer.told)
