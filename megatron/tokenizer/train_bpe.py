"""Training of a byte-level BPE tokenizer."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.io import read_json, write_json
from megatron.tokenizer.bpe import BpeTokenizer
from megatron.tokenizer.eod import EOD_NAMES

TRAINING_RECORD = "training.json"
SURROGATE = re.compile("[\ud800-\udfff]")  # an unpaired surrogate from a JSON escape is not a character


def train_bpe(texts: Iterable[str], n_tokens: int, folder: Path) -> Path:
    """Train on texts and write <folder>/tokenizer.json with ids 0..n_tokens - 1; `<|endoftext|>` is id 0.

    Raises ValueError if n_tokens is less than the 256 bytes and the special token, or if the text yields
    fewer tokens.
    """
    if n_tokens < 257:
        raise ValueError(f"n_tokens: got {n_tokens}, expected 257 or more (256 bytes and {EOD_NAMES[0]})")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens,
        special_tokens=[EOD_NAMES[0]],
        # all 256 bytes, also those that the text lacks: the tokenizer then encodes any text
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    if inner.get_vocab_size() < n_tokens:
        raise ValueError(
            f"text: got {inner.get_vocab_size()} tokens from it, expected {n_tokens}. Use more text."
        )
    return BpeTokenizer(inner, str(folder)).save(folder)


def train_bpe_on_file(path: Path, key: str, n_tokens: int, folder: Path) -> bool:
    """Train on the texts of a .jsonl. Return False if the folder already has the result of the same input.

    Raises FileNotFoundError, and ValueError with file and line for a line without text under the key.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file. Create it with tools/prepare_corpus.py.")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    source = {"sha256": sha256, "key": key, "n_tokens": n_tokens}
    record_path = folder / TRAINING_RECORD
    if (folder / "tokenizer.json").is_file() and read_json(record_path) == source:
        return False
    # otherwise a run killed below would leave this record beside another text's tokenizer
    record_path.unlink(missing_ok=True)
    train_bpe(_read_texts(path, key), n_tokens, folder)
    # last: the record exists only beside a complete tokenizer.json
    write_json(record_path, source)
    return True


def _read_texts(path: Path, key: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: no text under '{key}' ({type(error).__name__}: {error})"
                ) from error
            if not isinstance(text, str):
                raise ValueError(
                    f"{path}, line {number}: '{key}' is {type(text).__name__}, expected a string"
                )
            yield SURROGATE.sub("\ufffd", text)
