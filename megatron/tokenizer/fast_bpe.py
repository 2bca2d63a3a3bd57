"""C++ encoder of byte-level BPE for tokenizers for which it gives exactly the ids of `tokenizers`."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron import _csrc
from megatron.tokenizer.code_points import load_gpt2_classes, load_table
from megatron.tokenizer.split_pattern import UnsupportedPatternError
from megatron.tokenizer.stages import compile_stages

if TYPE_CHECKING:
    from megatron.tokenizer.bpe import BpeTokenizer

NEVER_IN_UTF8 = [0xC0, 0xC1, *range(0xF5, 0x100)]


@dataclass(frozen=True)
class FastBpe:
    """Vocabulary and merges of a byte-level BPE in C++. Each thread creates its own worker.

    library     tokenizer of the library, for texts that C++ does not encode
    raw_tokens  added tokens that the library finds before it normalizes a text
    """

    vocabulary: "_csrc.BpeVocabulary"
    library: "BpeTokenizer | None" = None
    raw_tokens: tuple[str, ...] = ()

    def create_worker(self) -> "_csrc.BpeWorker":
        """Return cache and buffers for one thread."""
        return _csrc.BpeWorker(self.vocabulary)


@cache
def unicode_to_bytes() -> dict[str, int]:
    """Return the byte of each printable character in byte-level vocabularies (GPT-2's encoder.py).

    Printable Latin-1 bytes map to themselves, the other 68 bytes to the characters from U+0100 on.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)]
    # 33 control characters and space, 0x7F to 0xA0, and 0xAD, the soft hyphen: 33 + 34 + 1 = 68
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def compile_fast_bpe(tokenizer_json: dict[str, Any]) -> tuple[FastBpe | None, str]:
    """Return (encoder, "") if C++ gives exactly the ids of a tokenizer.json, else (None, reason)."""
    model = tokenizer_json["model"]
    reason = _find_unsupported_feature(model)
    if reason:
        return None, reason
    vocabulary: dict[str, int] = model["vocab"]
    # byte -> id; some vocabularies lack the bytes that never occur in UTF-8
    byte_ids = np.full(256, -1, dtype=np.int64)
    byte_ids[NEVER_IN_UTF8] = 0
    for letter, byte in unicode_to_bytes().items():
        byte_ids[byte] = vocabulary.get(letter, byte_ids[byte])
    try:
        needs_nfc = _find_normalization(tokenizer_json.get("normalizer"))
        stages, is_gpt2 = compile_stages(tokenizer_json.get("pre_tokenizer"))
        if (byte_ids < 0).any():
            return None, f"the vocabulary lacks {int((byte_ids < 0).sum())} of the bytes of UTF-8"
        merges = _csrc.merge_ids(vocabulary, model["merges"])
    except UnsupportedPatternError as error:
        return None, str(error)
    except KeyError as error:
        return None, f"a merge produces {error}, which is not in its vocabulary"
    compiled = _csrc.bpe_vocabulary(byte_ids, merges)
    for stage in stages:
        compiled.add_stage(stage.automaton.classes, stage.automaton.transitions, stage.drops_gaps)
    if is_gpt2:
        compiled.use_gpt2_pattern(load_gpt2_classes())
    if needs_nfc:
        compiled.set_combining(load_table("combining"))
    if model.get("ignore_merges"):
        letters = np.empty(256, dtype=np.int64)
        for letter, byte in unicode_to_bytes().items():
            letters[byte] = ord(letter)
        compiled.set_whole_words(vocabulary, letters)
    try:
        _set_added_tokens(compiled, tokenizer_json.get("added_tokens") or [], needs_nfc)
    except UnsupportedPatternError as error:
        return None, str(error)
    raw = (token for token in tokenizer_json.get("added_tokens") or [] if not token.get("normalized"))
    return FastBpe(compiled, raw_tokens=tuple(token["content"] for token in raw)), ""


def compile_gpt2_bpe(merges: str, eod: str, eod_id: int) -> FastBpe:
    """Compile GPT-2's tokenizer from its merges: the lines of its file after the first.

    GPT-2's ids are the bytes in the order of their printable characters, then the merges in order. Its
    vocab.json contains nothing else and is slow to read.
    """
    letters = unicode_to_bytes()
    rows = _csrc.ranked_merge_ids("\n".join(letters), merges)
    # letters.values()[id] is the byte of an id; argsort inverts this permutation
    byte_ids = np.argsort(np.array(list(letters.values())))
    compiled = _csrc.bpe_vocabulary(byte_ids, rows)
    compiled.use_gpt2_pattern(load_gpt2_classes())
    _set_added_tokens(compiled, [{"content": eod, "id": eod_id, "special": True}], needs_nfc=False)
    return FastBpe(compiled)


def _set_added_tokens(compiled: "_csrc.BpeVocabulary", added: list[dict[str, Any]], needs_nfc: bool) -> None:
    """Set the tokens that are found before normalization, and those that are found after it.

    Raises UnsupportedPatternError for two tokens of one text.
    """
    conditions = ("single_word", "lstrip", "rstrip", "special")
    rows: dict[bool, dict[str, tuple[Any, ...]]] = {False: {}, True: {}}
    for token in added:
        content, is_normalized = token["content"], bool(token.get("normalized"))
        if not content:
            continue
        if is_normalized and needs_nfc:
            from tokenizers import normalizers  # slow to import, and rarely needed

            content = normalizers.NFC().normalize_str(content)
        if content in rows[is_normalized]:
            raise UnsupportedPatternError(f"two of its added tokens are {content!r} after normalization")
        flags = (bool(token.get(key)) for key in conditions)
        rows[is_normalized][content] = (content, token["id"], *flags)
    kinds = load_table("word") | load_table("strip") << 1
    compiled.set_added_tokens(list(rows[False].values()), list(rows[True].values()), kinds)


def _find_normalization(normalizer: dict[str, Any] | None) -> bool:
    """Return whether text is normalized to NFC. Raises UnsupportedPatternError for another normalizer."""
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any([_find_normalization(part) for part in normalizer["normalizers"]])
    if normalizer["type"] != "NFC":
        raise UnsupportedPatternError(f"its normalizer is {normalizer['type']}")
    return True


def _find_unsupported_feature(model: dict[str, Any]) -> str:
    """Return the first feature of a model that C++ does not support, empty if none."""
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            return f"its model has {key}"
    return ""
