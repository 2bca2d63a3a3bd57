"""C++ encoder of BPE for tokenizers for which it gives exactly the ids of `tokenizers`."""

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron import _csrc
from megatron.tokenizer.automaton import Automaton, compile_automaton
from megatron.tokenizer.code_points import load_gpt2_classes, load_table
from megatron.tokenizer.split_pattern import UnsupportedPatternError

if TYPE_CHECKING:
    from megatron.tokenizer.bpe import BpeTokenizer

NEVER_IN_UTF8 = [0xC0, 0xC1, *range(0xF5, 0x100)]
BLANK = "\u2581"
METASPACE_PREFIXES = {"always": "missing", "first": "first", "never": "none"}


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
    # byte -> id; some vocabularies lack
    # the bytes that never occur in UTF-8
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
    for automaton, drops_gaps in stages:
        compiled.add_stage(automaton.classes, automaton.transitions, drops_gaps)
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
    # letters.values()[id] is the byte of an id;
    # argsort inverts this permutation
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


@dataclass(frozen=True)
class BlankRules:
    """Use of U+2581 in place of blanks, as in SentencePiece. See `_csrc.character_vocabulary`."""

    prefix: str = "none"
    splits_words: bool = False
    normalizes: bool = False


def ends_with_bytes(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Return whether words become characters that stand for bytes."""
    parts = flatten_parts(pre_tokenizer, "pretokenizers")
    return bool(parts) and parts[-1]["type"] == "ByteLevel"


def find_blank_rules(normalizer: dict[str, Any] | None, pre_tokenizer: dict[str, Any] | None) -> BlankRules:
    """Return how a tokenizer replaces blanks. Raises UnsupportedPatternError for other steps."""
    rules = BlankRules()
    blank = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    for part in flatten_parts(normalizer, "normalizers"):
        if part == {"type": "Prepend", "prepend": BLANK} and rules == BlankRules():
            rules = BlankRules(prefix="every")
        elif part == blank and not rules.normalizes:
            rules = BlankRules(rules.prefix, normalizes=True)
        else:
            raise UnsupportedPatternError(f"its normalizer has {part['type']} of another form")
    if rules.prefix == "every" and not rules.normalizes:
        raise UnsupportedPatternError("its normalizer adds U+2581, but does not replace blanks")
    parts = flatten_parts(pre_tokenizer, "pretokenizers")
    if rules.normalizes:  # a split at blanks, which no longer occur (Gemma)
        parts = [part for part in parts if part["type"] != "Split" or part["pattern"] != {"String": " "}]
    for part in parts:
        is_metaspace = part["type"] == "Metaspace" and part["replacement"] == BLANK
        if not is_metaspace or rules.prefix == "every" or len(parts) > 1:
            raise UnsupportedPatternError(f"its pre-tokenizer has {part['type']}")
        prefix = METASPACE_PREFIXES.get(str(part.get("prepend_scheme")))
        if prefix is None:
            raise UnsupportedPatternError("its Metaspace has an unknown prepend_scheme")
        return BlankRules(prefix, bool(part.get("split", True)), rules.normalizes)
    if not rules.normalizes:
        raise UnsupportedPatternError("it has neither byte-level words nor U+2581 in place of blanks")
    return rules


def compile_stages(pre_tokenizer: dict[str, Any] | None) -> tuple[list[tuple[Automaton, bool]], bool]:
    """Return (stages, whether GPT-2's pattern follows them) of a pre-tokenizer that ends with ByteLevel.

    The pieces of a stage are the matches of its automaton and the text
    between them, which is dropped if the second value is True. Raises
    UnsupportedPatternError.
    """
    parts = flatten_parts(pre_tokenizer, "pretokenizers")
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise UnsupportedPatternError("its pre-tokenizer does not end with ByteLevel")
    last = parts.pop()
    if last.get("add_prefix_space"):
        raise UnsupportedPatternError("its pre-tokenizer adds a blank before a text")
    return [_compile_stage(part) for part in parts], bool(last.get("use_regex", True))


def flatten_parts(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the parts of a pre-tokenizer or normalizer; a Sequence has its parts under `key`."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for outer in part[key] for inner in flatten_parts(outer, key)]


def _compile_stage(part: dict[str, Any]) -> tuple[Automaton, bool]:
    if part["type"] == "Digits":
        pattern = r"\p{numeric}" if part["individual_digits"] else r"\p{numeric}+"
        return compile_automaton(pattern, {"numeric": load_table("numeric") == 1}), False
    if part["type"] != "Split":
        raise UnsupportedPatternError(f"its pre-tokenizer has {part['type']}")
    # inverted, the text between matches is removed
    drops_gaps = part["behavior"] == "Removed" and bool(part["invert"])
    if part["behavior"] != "Isolated" and not drops_gaps:
        raise UnsupportedPatternError(f"its pre-tokenizer splits with {part['behavior']}")
    pattern = part["pattern"]
    text = pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])
    return compile_automaton(text), drops_gaps
