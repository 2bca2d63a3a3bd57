"""The kinds of tokenizer that preprocessing knows, by the names that Megatron's users know."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.tokenizer.bpe import bpe_of_files, load_tokenizer
from megatron.tokenizer.eod import Eod, WithEod

KINDS = ("HFTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer", "Llama2cTokenizer", "NullTokenizer")
MOST_IDS = 2**31 - 1


class Tokenizer(Protocol):
    """Text to ids and back. `sha256` is equal for two that give equal ids."""

    name: str
    n_tokens: int
    eod: Eod | None
    sha256: str

    @property
    def eod_id(self) -> int:
        """The id that ends a document. ValueError where none is known."""
        ...

    def choose_eod(self, token: str | None, number: int | None) -> None:
        """Replace the end by what the caller names."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without an end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


@dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer, in the words of the command line.

    model       a folder, file or hub name (HFTokenizer), a .model file (SentencePieceTokenizer) or a
                .bin file (Llama2cTokenizer)
    vocab_file, merge_file   of a GPT2BPETokenizer
    vocab_size  of a NullTokenizer: ids 0..vocab_size - 1, and vocab_size ends a document
    eod_token, eod_id   what ends a document, instead of what the tokenizer's own files say (eod.py)
    """

    kind: str = "HFTokenizer"
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    eod_token: str | None = None
    eod_id: int | None = None


def load(spec: TokenizerSpec | str) -> Tokenizer:
    """The tokenizer that a spec, or the name of a Hugging Face one, describes.

    Raises ValueError where the spec lacks what its kind needs, and what the kinds themselves raise.
    """
    if isinstance(spec, str):
        return load_tokenizer(spec)
    tokenizer = _load(spec)
    tokenizer.choose_eod(spec.eod_token, spec.eod_id)
    return tokenizer


def _load(spec: TokenizerSpec) -> Tokenizer:
    needs = {
        "HFTokenizer": {"--tokenizer-model": spec.model},
        "SentencePieceTokenizer": {"--tokenizer-model": spec.model},
        "Llama2cTokenizer": {"--tokenizer-model": spec.model},
        "GPT2BPETokenizer": {"--vocab-file": spec.vocab_file, "--merge-file": spec.merge_file},
        "NullTokenizer": {"--vocab-size": spec.vocab_size},
    }[spec.kind]
    lacking = [name for name, value in needs.items() if value is None]
    if lacking:
        way = (
            "; tools/train_tokenizer.py writes one, or give a name of the hub"
            if spec.kind == "HFTokenizer"
            else ""
        )
        raise ValueError(f"{spec.kind}: wants {' and '.join(lacking)}{way}")
    if spec.kind == "HFTokenizer":
        return load_tokenizer(str(spec.model))
    if spec.kind == "SentencePieceTokenizer":
        return SentencePiece(Path(str(spec.model)))
    if spec.kind == "Llama2cTokenizer":
        from megatron.tokenizer.llama2c import Llama2cTokenizer  # the library, which the others may not want

        return Llama2cTokenizer(Path(str(spec.model)))
    if spec.kind == "NullTokenizer":
        assert spec.vocab_size is not None
        return Null(spec.vocab_size)
    vocab, merges = Path(str(spec.vocab_file)), Path(str(spec.merge_file))
    for path in (vocab, merges):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file of a GPT2BPETokenizer")
    return bpe_of_files(vocab, merges, vocab.stem)


def load_by_name(name: str) -> Tokenizer:
    """The tokenizer of a folder, a file or a hub name: .model SentencePiece, .bin llama2.c, else HF."""
    kind = {".model": "SentencePieceTokenizer", ".bin": "Llama2cTokenizer"}.get(
        Path(name).suffix, "HFTokenizer"
    )
    return load(TokenizerSpec(kind=kind, model=name))


class Null(WithEod):
    """Numbers separated by spaces are their own ids."""

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"--vocab-size: found {vocab_size}, wanted 1 or more")
        if vocab_size > MOST_IDS:
            raise ValueError(f"--vocab-size: found {vocab_size}, wanted at most {MOST_IDS}: ids are int32")
        self.name = f"null-{vocab_size}"
        self.vocab_size, self.n_tokens = vocab_size, vocab_size + 1
        self.eod = Eod(vocab_size, None, "NullTokenizer")
        self.sha256 = hashlib.sha256(self.name.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            digits = word.lstrip("0")[:20]  # more would be too large, and Python would not convert very many
            if not (word.isascii() and word.isdigit()) or int(digits or 0) >= self.vocab_size:
                raise ValueError(
                    f"NullTokenizer: found '{word[:20]}', wanted numbers under {self.vocab_size}"
                )
            ids.append(int(digits or 0))
        return ids

    def token_id(self, token: str) -> int | None:
        return int(token) if token.isascii() and token.isdigit() and int(token) < self.n_tokens else None

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class SentencePiece(WithEod):
    """A SentencePiece .model file, through its own library."""

    def __init__(self, path: Path) -> None:
        """FileNotFoundError, or ValueError for another file."""
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such SentencePiece model")
        import sentencepiece  # only this kind wants it

        raw = path.read_bytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(raw)
        except RuntimeError as error:
            raise ValueError(f"{path}: not a SentencePiece model") from error  # its words are of its own code
        self.name, self.sha256 = str(path), hashlib.sha256(raw).hexdigest()
        self.n_tokens, end = self._processor.vocab_size(), self._processor.eos_id()
        self.eod = None if end < 0 else Eod(end, self._processor.IdToPiece(end), "SentencePiece's eos")
        self.missing_eod = "the model has no </s>"

    def token_id(self, token: str) -> int | None:
        found = self._processor.PieceToId(token)
        return found if self._processor.IdToPiece(found) == token else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.Encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.Decode(list(ids))
