"""Encoders of texts: in C++ if it gives exactly the library's ids, otherwise the tokenizer's library."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import numpy as np

from megatron import _csrc
from megatron.tokenizer.bpe import GPT2_EOD, BpeTokenizer, Gpt2Tokenizer
from megatron.tokenizer.code_points import clear_tables
from megatron.tokenizer.eod import Tokenizer
from megatron.tokenizer.fast_bpe import FastBpe, compile_fast_bpe, compile_gpt2_bpe, compile_model

NO_EOD = -1


class Encoder(Protocol):
    """Encoder for one thread. Ids are uint32 [all tokens], lengths int32 [texts]."""

    def encode(self, texts: Sequence[str], eod: int = NO_EOD) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of the texts, each followed by `eod` unless NO_EOD, and lengths."""
        ...


class FastEncoder:
    """Encoder in C++. `special`: the text of a special token within a text becomes its id.

    A text that may change under NFC is normalized by the library first,
    if the tokenizer normalizes so. If it has added tokens too, which
    the library finds before it normalizes, the library encodes it.
    """

    def __init__(self, fast: FastBpe, special: bool = True) -> None:
        self.worker = fast.create_worker()
        self.special = special
        self.fast = fast

    def encode(self, texts: Sequence[str], eod: int = NO_EOD) -> tuple[np.ndarray, np.ndarray]:
        # ["a", "\u00e9"]: 1 and 2 bytes of UTF-8, ends [1, 3]
        raw = [text.encode() for text in texts]
        ends = np.cumsum([len(text_bytes) for text_bytes in raw], dtype=np.int64)
        return self.encode_concatenated(np.frombuffer(b"".join(raw), dtype=np.uint8), ends, eod)

    def encode_concatenated(
        self, texts: np.ndarray, ends: np.ndarray, eod: int = NO_EOD
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode concatenated UTF-8 texts, uint8 [bytes]. Text i ends at byte ends[i], int64 [texts]."""
        # ids uint32 [tokens] also where a corpus stores uint16: the
        # writer converts them
        ids, lengths = _csrc.encode_texts(self.worker, texts, ends, self.special, eod)
        if (lengths >= 0).all():
            return ids, lengths
        return self._complete(ids, lengths, texts, ends, eod)

    def _complete(
        self, ids: np.ndarray, lengths: np.ndarray, texts: np.ndarray, ends: np.ndarray, eod: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Insert the ids of the texts that C++ has not encoded: their length is -1."""
        begins = np.concatenate([[0], ends[:-1]])
        missing = np.flatnonzero(lengths < 0)
        documents = [texts[begins[i] : ends[i]].tobytes().decode() for i in missing]
        encoded = [self._encode_unnormalized(document, eod) for document in documents]
        more_ids = np.concatenate(encoded)
        more_lengths = np.array([len(part) for part in encoded], dtype=np.int32)
        # before which of the present ids each new document is inserted
        positions = np.cumsum(np.maximum(lengths, 0))[missing]
        ids = np.insert(ids, np.repeat(positions, more_lengths), more_ids)
        lengths[missing] = more_lengths
        return ids, lengths

    def _encode_unnormalized(self, text: str, eod: int) -> np.ndarray:
        """Return the ids of a text that may not be in NFC, uint32."""
        from tokenizers import normalizers  # slow to import, and rarely needed

        if any(token in text for token in self.fast.raw_tokens):
            assert self.fast.library is not None, "build_fast_bpe sets it"
            return LibraryEncoder(self.fast.library, self.special).encode([text], eod)[0]
        raw = np.frombuffer(normalizers.NFC().normalize_str(text).encode(), dtype=np.uint8)
        return _csrc.encode_texts(self.worker, raw, np.array([len(raw)]), self.special, eod, True)[0]


class LibraryEncoder:
    """Encoder of the tokenizer's library. `special` as in FastEncoder."""

    def __init__(self, tokenizer: Tokenizer, special: bool = True) -> None:
        self.tokenizer = tokenizer
        if not isinstance(tokenizer, BpeTokenizer):
            return  # the other kinds have no special tokens in texts
        # True: the library passes the special token's text to the
        # pre-tokenizer, like any other text
        tokenizer.inner.encode_special_tokens = not special

    def encode(self, texts: Sequence[str], eod: int = NO_EOD) -> tuple[np.ndarray, np.ndarray]:
        # the library has no option for an end-of-document token
        tail = [] if eod == NO_EOD else [eod]
        encoded = [ids + tail for ids in self.tokenizer.encode_batch(texts)]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int32)
        ids = np.fromiter(chain.from_iterable(encoded), dtype=np.uint32, count=int(lengths.sum()))
        return ids, lengths


def encode_with_location(
    encoder: Encoder, texts: Sequence[str], locations: Sequence[str], eod: int = NO_EOD
) -> tuple[np.ndarray, np.ndarray]:
    """Encode texts. The ValueError of a text that cannot be encoded begins with its location."""
    try:
        return encoder.encode(texts, eod)
    except ValueError:
        # the error of a batch has no index: encode the texts one by one
        # until the first failure
        for text, location in zip(texts, locations, strict=True):
            try:
                encoder.encode([text], eod)
            except ValueError as error:
                raise ValueError(f"{location}: {error}") from error
        raise


def build_fast_bpe(tokenizer: Tokenizer) -> tuple[FastBpe | None, str]:
    """Return (C++ encoder of a tokenizer, ""), or (None, reason) if it is not supported."""
    if not isinstance(tokenizer, BpeTokenizer):
        return None, f"it is a {type(tokenizer).__name__}"
    fast, reason = _compile(tokenizer)
    # building takes several times the memory of the encoder
    clear_tables()
    _csrc.release_memory()
    return fast, reason


def _compile(tokenizer: BpeTokenizer) -> tuple[FastBpe | None, str]:
    if isinstance(tokenizer, Gpt2Tokenizer):
        assert GPT2_EOD.token is not None, "a constant of bpe.py"
        return compile_gpt2_bpe(tokenizer.merge_lines(), GPT2_EOD.token, GPT2_EOD.id), ""
    try:
        fast, reason = compile_model(tokenizer.take_model())
    except ValueError:
        fast, reason = compile_fast_bpe(tokenizer.inner.to_str())  # explains why
    return (None, reason) if fast is None else (replace(fast, library=tokenizer), "")
