"""Training of a byte-level BPE tokenizer."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.tokenizer.bpe import BpeTokenizer
from megatron.tokenizer.eod import EOD_NAMES


def train_bpe(texts: Iterable[str], n_tokens: int, folder: Path) -> Path:
    """Train on texts and write <folder>/tokenizer.json with ids 0..n_tokens - 1; `<|endoftext|>` is id 0.

    Raises ValueError if n_tokens is less than the 256 bytes and the
    special token, or if the text yields fewer tokens.
    """
    if n_tokens < 257:
        raise ValueError(f"n_tokens: got {n_tokens}, expected 257 or more (256 bytes and {EOD_NAMES[0]})")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens,
        special_tokens=[EOD_NAMES[0]],
        # all 256 bytes, also those that the text lacks: the tokenizer
        # then encodes any text
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    if inner.get_vocab_size() < n_tokens:
        raise ValueError(
            f"text: got {inner.get_vocab_size()} tokens from it, expected {n_tokens}. Use more text."
        )
    return BpeTokenizer(inner, str(folder)).save(folder)
