"""C++ encoder of BPE for tokenizers for which it gives exactly the ids of `tokenizers`."""

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron import _csrc
from megatron.tokenizer.code_points import load_gpt2_classes, load_table
from megatron.tokenizer.split_pattern import UnsupportedPatternError
from megatron.tokenizer.stages import compile_stages, ends_with_bytes, find_blank_rules, flatten_parts

if TYPE_CHECKING:
    from megatron.tokenizer.bpe import BpeTokenizer

NEVER_IN_UTF8 = [0xC0, 0xC1, *range(0xF5, 0x100)]


@dataclass(frozen=True)
class FastBpe:
    """Vocabulary and merges of a BPE in C++. Each thread creates its own worker.

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

    Printable Latin-1 bytes map to themselves, the other 68 bytes to the
    characters from U+0100 on.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(0xAE, 0x100)]
    # 33 control characters and space, 0x7F to 0xA0, and 0xAD, the soft
    # hyphen: 33 + 34 + 1 = 68
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def compile_fast_bpe(tokenizer_json: str) -> tuple[FastBpe | None, str]:
    """Return (encoder, "") if C++ gives exactly the ids of a tokenizer.json, else (None, reason)."""
    try:
        model = _csrc.TokenizerModel(tokenizer_json.encode())
    except ValueError as error:
        kind = json.loads(tokenizer_json)["model"].get("type")
        return None, str(error) if kind == "BPE" else f"its model is {kind}, not BPE"
    return compile_model(model)


def compile_model(model: "_csrc.TokenizerModel") -> tuple[FastBpe | None, str]:
    """Do the same for a tokenizer.json that is read."""
    settings = json.loads(model.settings)
    reason = _find_unsupported_feature(settings["model"])
    if reason:
        return None, reason
    added = settings.get("added_tokens") or []
    try:
        if ends_with_bytes(settings.get("pre_tokenizer")) or not settings["model"].get("byte_fallback"):
            compiled, normalizer = _compile_bytes(model, settings)
        else:
            compiled, normalizer = _compile_characters(model, settings)
        _set_added_tokens(compiled, added, normalizer)
    except ValueError as error:
        return None, str(error)
    raw = (token for token in added if not token.get("normalized"))
    return FastBpe(compiled, raw_tokens=tuple(token["content"] for token in raw)), ""


def _compile_bytes(
    model: "_csrc.TokenizerModel", settings: dict[str, Any]
) -> tuple["_csrc.BpeVocabulary", dict[str, Any] | None]:
    """Return (vocabulary, normalizer of added tokens). Raises UnsupportedPatternError."""
    # byte -> id; some vocabularies lack the bytes that never occur in
    # UTF-8
    byte_ids = np.full(256, -1, dtype=np.int64)
    byte_ids[NEVER_IN_UTF8] = 0
    letters = np.empty(256, dtype=np.int64)
    for letter, byte in unicode_to_bytes().items():
        letters[byte] = ord(letter)
        if (token_id := model.find(letter)) is not None:
            byte_ids[byte] = token_id
    needs_nfc = _find_normalization(settings.get("normalizer"))
    stages, is_gpt2 = compile_stages(settings.get("pre_tokenizer"))
    if (byte_ids < 0).any():
        n_missing = int((byte_ids < 0).sum())
        raise UnsupportedPatternError(f"the vocabulary lacks {n_missing} of the bytes of UTF-8")
    compiled = _csrc.bpe_vocabulary(byte_ids, model.merge_ids())
    for stage in stages:
        compiled.add_stage(stage.automaton.classes, stage.automaton.transitions, stage.drops_gaps)
    if is_gpt2:
        compiled.use_gpt2_pattern(load_gpt2_classes())
    if needs_nfc:
        compiled.set_combining(load_table("combining"))
    if settings["model"].get("ignore_merges"):
        compiled.set_whole_words(model, letters)
    return compiled, {"type": "NFC"} if needs_nfc else None


def _compile_characters(
    model: "_csrc.TokenizerModel", settings: dict[str, Any]
) -> tuple["_csrc.BpeVocabulary", dict[str, Any] | None]:
    """Return (vocabulary, normalizer of added tokens). Raises ValueError for another kind of tokenizer."""
    if settings["model"].get("ignore_merges"):
        raise UnsupportedPatternError("its model has ignore_merges without byte-level words")
    rules = find_blank_rules(settings.get("normalizer"), settings.get("pre_tokenizer"))
    compiled = _csrc.character_vocabulary(model, rules.prefix, rules.splits_words, rules.normalizes)
    return compiled, settings.get("normalizer")


def compile_gpt2_bpe(merges: str, eod: str, eod_id: int) -> FastBpe:
    """Compile GPT-2's tokenizer from its merges: the lines of its file after the first.

    GPT-2's ids are the bytes in the order of their printable
    characters, then the merges in order. Its vocab.json contains
    nothing else and is slow to read.
    """
    letters = unicode_to_bytes()
    rows = _csrc.ranked_merge_ids("\n".join(letters), merges)
    # letters.values()[id] is the byte of an id; argsort inverts this
    # permutation
    byte_ids = np.argsort(np.array(list(letters.values())))
    compiled = _csrc.bpe_vocabulary(byte_ids, rows)
    compiled.use_gpt2_pattern(load_gpt2_classes())
    _set_added_tokens(compiled, [{"content": eod, "id": eod_id, "special": True}], None)
    return FastBpe(compiled)


def _set_added_tokens(
    compiled: "_csrc.BpeVocabulary", added: list[dict[str, Any]], normalizer: dict[str, Any] | None
) -> None:
    """Set the tokens that are found before normalization, and those that are found after it.

    Raises UnsupportedPatternError for two tokens of one text.
    """
    conditions = ("single_word", "lstrip", "rstrip", "special")
    rows: dict[bool, dict[str, tuple[Any, ...]]] = {False: {}, True: {}}
    for token in added:
        content, is_normalized = token["content"], bool(token.get("normalized"))
        if not content:
            continue
        if is_normalized and normalizer is not None:
            content = _normalize(normalizer, content)
        if content in rows[is_normalized]:
            raise UnsupportedPatternError(f"two of its added tokens are {content!r} after normalization")
        flags = (bool(token.get(key)) for key in conditions)
        rows[is_normalized][content] = (content, token["id"], *flags)
    kinds = load_table("word") | load_table("strip") << 1
    compiled.set_added_tokens(list(rows[False].values()), list(rows[True].values()), kinds)


def _normalize(normalizer: dict[str, Any], text: str) -> str:
    from tokenizers import normalizers  # slow to import, and rarely needed

    inner = normalizers.Sequence([])
    inner.__setstate__(json.dumps(normalizer).encode())
    return inner.normalize_str(text)


def _find_normalization(normalizer: dict[str, Any] | None) -> bool:
    """Return whether text is normalized to NFC. Raises UnsupportedPatternError for another normalizer."""
    kinds = {part["type"] for part in flatten_parts(normalizer, "normalizers")}
    if other := kinds - {"NFC"}:
        raise UnsupportedPatternError(f"its normalizer is {other.pop()}")
    return bool(kinds)


def _find_unsupported_feature(model: dict[str, Any]) -> str:
    """Return the first feature of a model that C++ does not support, empty if none."""
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            return f"its model has {key}"
    return ""
