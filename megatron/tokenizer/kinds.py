"""Kinds of tokenizers supported by preprocessing, with Megatron's names, and their command-line options."""

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.cli import non_negative_int, positive_int
from megatron.tokenizer.bpe import BpeTokenizer, load_bpe_files, load_hf_tokenizer
from megatron.tokenizer.eod import EOD_NAMES, Eod
from megatron.tokenizer.eod import Tokenizer as Tokenizer

# kind of tokenizer -> the options that name its files
TOKENIZER_FILES = {
    "HFTokenizer": ("tokenizer_model",),
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "BertWordPieceLowerCase": ("vocab_file",),
    "BertWordPieceCase": ("vocab_file",),
    "NullTokenizer": ("vocab_size",),
}
KINDS = tuple(TOKENIZER_FILES)
MAX_NULL_IDS = 2**31 - 1
UNKNOWN = "[UNK]"
MAX_WORD = 200  # characters of a word; a longer one is [UNK], in Google's tokenizer as in Megatron's


@dataclass(frozen=True)
class TokenizerSpec:
    """Description of a tokenizer by its command-line options.

    model       a folder, file or hub name (HFTokenizer)
                or a .model file (SentencePieceTokenizer)
    vocab_file, merge_file   of a GPT2BPETokenizer; the vocab.txt of a BertWordPiece tokenizer
    vocab_size  of a NullTokenizer: ids 0..vocab_size - 1,
                and vocab_size is the end-of-document id
    eod_token, eod_id   end-of-document token, overrides
                        the one in the tokenizer's files (eod.py)
    """

    kind: str = "HFTokenizer"
    model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    eod_token: str | None = None
    eod_id: int | None = None


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options that `parse_tokenizer_spec` reads."""
    group = parser.add_argument_group("tokenizer")
    kinds = "{" + ",".join(KINDS) + "}"
    add = group.add_argument
    add("--tokenizer-type", type=parse_kind, default=KINDS[0], metavar=kinds, help="kind of tokenizer")
    add(
        "--tokenizer-model",
        metavar="NAME",
        help="HFTokenizer: a tokenizer.json, a folder with one or with vocab.json and merges.txt, or a name "
        "on the Hugging Face hub (gpt2 needs no network); SentencePieceTokenizer: a .model file",
    )
    add("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json; Bert*: vocab.txt")
    add("--merge-file", metavar="PATH", help="GPT2BPETokenizer: its merges.txt")
    text = "NullTokenizer: the text is numbers from 0 to N - 1"
    add("--vocab-size", type=positive_int, metavar="N", help=text)
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    end = group.add_mutually_exclusive_group()
    end.add_argument(
        "--eod-token",
        metavar="TOKEN",
        help="the end-of-document token; default: eos_token of the tokenizer_config.json beside the "
        f"tokenizer, else the only one that its vocabulary has of {', '.join(EOD_NAMES)}",
    )
    end.add_argument("--eod-id", type=non_negative_int, metavar="ID", help="the same, by its id")
    add(
        "--special-text",
        choices=["token", "text"],
        default="token",
        help="encoding of a special token's text such as <|endoftext|> within a document: token, its id, as "
        "in the tokenizers library; text, ordinary characters, as in tiktoken",
    )


def parse_kind(text: str) -> str:
    """Return a kind of tokenizer. Raises argparse's error, which names a replacement for a removed kind."""
    if text not in KINDS:
        hint = " Convert the file to a tokenizer.json for HFTokenizer." if text == "Llama2cTokenizer" else ""
        raise argparse.ArgumentTypeError(f"got {text}, expected {', '.join(KINDS)}.{hint}")
    return text


def parse_tokenizer_spec(args: argparse.Namespace) -> TokenizerSpec:
    """Return the tokenizer that the options describe."""
    return TokenizerSpec(
        args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file, args.vocab_size,
        args.eod_token, args.eod_id,
    )  # fmt: skip


def load_tokenizer(spec: TokenizerSpec | str) -> Tokenizer:
    """Load the tokenizer of a spec, or of the name of a Hugging Face tokenizer.

    Raises ValueError if the spec lacks an option of its kind, and the
    errors of the kinds.
    """
    if isinstance(spec, str):
        return load_hf_tokenizer(spec)
    tokenizer = _load_kind(spec)
    tokenizer.choose_eod(spec.eod_token, spec.eod_id)
    return tokenizer


def _load_kind(spec: TokenizerSpec) -> Tokenizer:
    _check_options(spec)
    if spec.kind == "HFTokenizer":
        return load_hf_tokenizer(str(spec.model))
    model, vocab, merges = Path(spec.model or ""), Path(spec.vocab_file or ""), Path(spec.merge_file or "")
    for path in (model, vocab, merges):
        if path.name and not path.is_file():
            raise FileNotFoundError(f"{path}: no such file of a {spec.kind}")
    if spec.kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        return SentencePieceTokenizer(model)
    if spec.kind in ("BertWordPieceLowerCase", "BertWordPieceCase"):
        return WordPieceTokenizer(vocab, spec.kind == "BertWordPieceLowerCase")
    if spec.kind == "NullTokenizer":
        assert spec.vocab_size is not None, "_check_options requires it"
        return NullTokenizer(spec.vocab_size)
    return load_bpe_files(vocab, merges, vocab.stem)


def _check_options(spec: TokenizerSpec) -> None:
    """Raise ValueError unless a spec has the options of its kind, and no others."""
    options: dict[str, str | int | None] = {
        "tokenizer_model": spec.model, "vocab_file": spec.vocab_file,
        "merge_file": spec.merge_file, "vocab_size": spec.vocab_size,
    }  # fmt: skip
    present = {name for name, value in options.items() if value is not None}
    required = TOKENIZER_FILES[spec.kind]
    if missing := [name for name in required if name not in present]:
        hint = "(train one with tools/train_tokenizer.py, or set a name of the hub)"
        message = f"{spec.kind}: {_format_options(missing)} missing"
        raise ValueError(f"{message} {hint}" if spec.kind == "HFTokenizer" else message)
    # an option of another kind would be ignored, and with it the
    # vocabulary that was meant
    if ignored := sorted(present - set(required)):
        owner = next(kind for kind, names in TOKENIZER_FILES.items() if ignored[0] in names)
        raise ValueError(
            f"{spec.kind}: got {_format_options(ignored)}, which it does not read. Remove the option, or "
            f"choose --tokenizer-type {owner}."
        )


def _format_options(names: Sequence[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def load_tokenizer_by_name(name: str) -> Tokenizer:
    """Load the tokenizer of a folder, file or hub name: .model SentencePiece, else Hugging Face."""
    kind = "SentencePieceTokenizer" if name.endswith(".model") else "HFTokenizer"
    return load_tokenizer(TokenizerSpec(kind=kind, model=name))


class NullTokenizer(Tokenizer):
    """Tokenizer of texts that already are ids: numbers separated by spaces."""

    def __init__(self, vocab_size: int) -> None:
        if not 1 <= vocab_size <= MAX_NULL_IDS:  # int32
            raise ValueError(f"--vocab-size: got {vocab_size}, expected 1 to {MAX_NULL_IDS}")
        self.name = f"null-{vocab_size}"
        # one id more than the text can contain, for the end of document
        self.vocab_size, self.n_tokens = vocab_size, vocab_size + 1
        self.eod = Eod(vocab_size, None, "NullTokenizer")
        self.sha256 = hashlib.sha256(self.name.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode_text(text) for text in texts]

    def _encode_text(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            # 20 digits always exceed vocab_size, and int() raises for
            # thousands of digits
            digits = word.lstrip("0")[:20]
            if not (word.isascii() and word.isdigit()) or int(digits or 0) >= self.vocab_size:
                limit = self.vocab_size
                raise ValueError(f"NullTokenizer: got '{word[:20]}', expected numbers below {limit}")
            ids.append(int(digits or 0))
        return ids

    def token_id(self, token: str) -> int | None:
        return int(token) if token.isascii() and token.isdigit() and int(token) < self.n_tokens else None

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class WordPieceTokenizer(BpeTokenizer):
    """WordPiece: words are split greedily into the longest pieces of the vocabulary.

    The text of a special token, such as [SEP], is ordinary characters within a
    document, as in Megatron. No token ends documents unless --eod-token or
    --eod-id names one.
    """

    def __init__(self, vocab: Path, lower_case: bool) -> None:
        """`lower_case`: also strip accents. Raises ValueError for another file."""
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers

        try:
            # the id of a token is the number of its line; for a repeated
            # token, of its last line
            pieces = {line.strip(): i for i, line in enumerate(vocab.read_text("utf-8").splitlines())}
        except UnicodeDecodeError as error:
            raise ValueError(f"{vocab}: got bytes that are not UTF-8, expected one token a line.") from error
        if UNKNOWN not in pieces:
            raise ValueError(f"{vocab}: got no line {UNKNOWN}, expected the vocab.txt of a BERT tokenizer.")
        model = models.WordPiece(pieces, unk_token=UNKNOWN, max_input_chars_per_word=MAX_WORD)
        inner = tokenizers.Tokenizer(model)
        inner.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=lower_case, lowercase=lower_case
        )
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        super().__init__(inner, str(vocab))


class SentencePieceTokenizer(Tokenizer):
    """Tokenizer of a SentencePiece .model file, through the sentencepiece library."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for another file."""
        import sentencepiece  # an optional dependency of this kind only

        raw = path.read_bytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(raw)
        except RuntimeError as error:
            # the library's message refers to its source code
            raise ValueError(f"{path}: not a SentencePiece model") from error
        self.name, self.sha256 = str(path), hashlib.sha256(raw).hexdigest()
        self.n_tokens, end = self._processor.vocab_size(), self._processor.eos_id()
        self.eod = None if end < 0 else Eod(end, self._processor.IdToPiece(end), "SentencePiece's eos")
        self.missing_eod = "the model has no </s>"

    def token_id(self, token: str) -> int | None:
        number = self._processor.PieceToId(token)
        # PieceToId returns the id of <unk> for an unknown piece
        return number if self._processor.IdToPiece(number) == token else None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.Encode(list(texts))

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.Decode(list(ids))
