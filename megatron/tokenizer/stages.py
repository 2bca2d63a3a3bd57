"""Pre-tokenizers: stages that split the pieces of the one before, or U+2581 in place of blanks."""

import re
from dataclasses import dataclass
from typing import Any

from megatron.tokenizer.automaton import Automaton, compile_automaton
from megatron.tokenizer.code_points import load_table
from megatron.tokenizer.split_pattern import UnsupportedPatternError


@dataclass(frozen=True)
class SplitStage:
    """Pieces are the matches of an automaton and the text between them, which may be dropped."""

    automaton: Automaton
    drops_gaps: bool


@dataclass(frozen=True)
class BlankRules:
    """Use of U+2581 in place of blanks, as in SentencePiece. See `_csrc.character_vocabulary`."""

    prefix: str = "none"
    splits_words: bool = False
    normalizes: bool = False


BLANK = "\u2581"
METASPACE_PREFIXES = {"always": "missing", "first": "first", "never": "none"}


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
    if rules.normalizes:  # a split at blanks, of which there are none (Gemma)
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


def compile_stages(pre_tokenizer: dict[str, Any] | None) -> tuple[list[SplitStage], bool]:
    """Return (stages, whether GPT-2's pattern follows them) of a pre-tokenizer that ends with ByteLevel.

    Raises UnsupportedPatternError.
    """
    parts = flatten_parts(pre_tokenizer, "pretokenizers")
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise UnsupportedPatternError("its pre-tokenizer does not end with ByteLevel")
    last = parts.pop()
    if last.get("add_prefix_space"):
        raise UnsupportedPatternError("its pre-tokenizer adds a blank before a text")
    return [_compile_stage(part) for part in parts], bool(last.get("use_regex", True))


def flatten_parts(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the parts of a pre-tokenizer or normalizer; those of a Sequence are under `key`."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for outer in part[key] for inner in flatten_parts(outer, key)]


def _compile_stage(part: dict[str, Any]) -> SplitStage:
    if part["type"] == "Digits":
        pattern = r"\p{numeric}" if part["individual_digits"] else r"\p{numeric}+"
        automaton = compile_automaton(pattern, {"numeric": load_table("numeric") == 1})
        return SplitStage(automaton, drops_gaps=False)
    if part["type"] != "Split":
        raise UnsupportedPatternError(f"its pre-tokenizer has {part['type']}")
    # inverted, the text between matches is removed
    drops_gaps = part["behavior"] == "Removed" and bool(part["invert"])
    if part["behavior"] != "Isolated" and not drops_gaps:
        raise UnsupportedPatternError(f"its pre-tokenizer splits with {part['behavior']}")
    pattern = part["pattern"]
    text = pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])
    return SplitStage(compile_automaton(text), drops_gaps)
