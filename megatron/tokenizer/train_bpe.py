"""Train a byte-level BPE on a text."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.run_dir import read_json, write_json
from megatron.tokenizer.bpe import EOD_NAMES, BpeTokenizer

ABOUT = "training.json"
SURROGATE = re.compile("[\ud800-\udfff]")  # an unpaired escape in JSON stands for no character


def train_bpe(texts: Iterable[str], n_tokens: int, folder: Path) -> Path:
    """Train on texts and write <folder>/tokenizer.json with ids 0..n_tokens - 1; `<|endoftext|>` is id 0.

    Raises ValueError where n_tokens does not hold the 256 bytes and the special token, or the text is too
    short to fill it.
    """
    if n_tokens < 257:
        raise ValueError(f"n_tokens: found {n_tokens}, wanted 257 or more (256 bytes and {EOD_NAMES[0]})")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens,
        special_tokens=[EOD_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    if inner.get_vocab_size() < n_tokens:
        raise ValueError(
            f"the text yields {inner.get_vocab_size()} tokens, wanted {n_tokens}; give more text"
        )
    return BpeTokenizer(inner, str(folder)).save(folder)


def train_bpe_on_file(path: Path, key: str, n_tokens: int, folder: Path) -> bool:
    """Train on the texts of a .jsonl; False when the folder already has what the same file gave.

    Raises FileNotFoundError, and ValueError with file and line for a line without text under the key.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such text; tools/prepare_corpus.py writes one")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    made_from = {"sha256": sha256, "key": key, "n_tokens": n_tokens}
    about = folder / ABOUT
    if (folder / "tokenizer.json").is_file() and read_json(about) == made_from:
        return False
    about.unlink(missing_ok=True)  # or a run killed below would leave it beside another text's tokenizer
    train_bpe(_texts(path, key), n_tokens, folder)
    write_json(about, made_from)
    return True


def _texts(path: Path, key: str) -> Iterator[str]:
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
                raise ValueError(f"{path}, line {number}: '{key}' is {type(text).__name__}, wanted a string")
            yield SURROGATE.sub("\ufffd", text)
