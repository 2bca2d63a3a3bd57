"""Stages of a pre-tokenizer: each splits the pieces of the one before."""

from dataclasses import dataclass
from typing import Any

from megatron.tokenizer.automaton import Automaton, compile_automaton
from megatron.tokenizer.code_points import load_table
from megatron.tokenizer.split_pattern import (
    Chars,
    Node,
    Repeat,
    UnsupportedPatternError,
    literal_pattern,
    parse_split_pattern,
)


@dataclass(frozen=True)
class SplitStage:
    """Pieces are the matches of an automaton and the text between them, which may be dropped."""

    automaton: Automaton
    drops_gaps: bool


def compile_stages(pre_tokenizer: dict[str, Any] | None) -> tuple[list[SplitStage], bool]:
    """Return (stages, whether GPT-2's pattern follows them) of a pre-tokenizer that ends with ByteLevel.

    Raises UnsupportedPatternError.
    """
    parts = _flatten(pre_tokenizer)
    if not parts or parts[-1]["type"] != "ByteLevel":
        raise UnsupportedPatternError("its pre-tokenizer does not end with ByteLevel")
    last = parts.pop()
    if last.get("add_prefix_space"):
        raise UnsupportedPatternError("its pre-tokenizer adds a blank before a text")
    return [_compile_stage(part) for part in parts], bool(last.get("use_regex", True))


def _flatten(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] != "Sequence":
        return [pre_tokenizer]
    return [part for inner in pre_tokenizer["pretokenizers"] for part in _flatten(inner)]


def _compile_stage(part: dict[str, Any]) -> SplitStage:
    if part["type"] == "Digits":
        digit = Chars(load_table("numeric") == 1)
        node: Node = digit if part["individual_digits"] else Repeat(digit, 1, None)
        return SplitStage(compile_automaton(node), drops_gaps=False)
    if part["type"] != "Split":
        raise UnsupportedPatternError(f"its pre-tokenizer has {part['type']}")
    # inverted, the text between matches is removed
    drops_gaps = part["behavior"] == "Removed" and bool(part["invert"])
    if part["behavior"] != "Isolated" and not drops_gaps:
        raise UnsupportedPatternError(f"its pre-tokenizer splits with {part['behavior']}")
    pattern: dict[str, str] = part["pattern"]
    node = parse_split_pattern(pattern["Regex"]) if "Regex" in pattern else literal_pattern(pattern["String"])
    return SplitStage(compile_automaton(node), drops_gaps)
