r"""Syntax trees of the regular expressions that split text into words, as in tokenizer.json.

Python's parser of `re` reads the pattern. Its syntax and Oniguruma's, which `tokenizers` uses, agree in these
parts: literals, escapes, classes with ranges, alternatives, groups, (?i:..), greedy, lazy and possessive
quantifiers, and the conditions (?=.), (?!.) and $ on one character. \p{..} becomes a placeholder. Everything
else, and all that the two read differently, raises UnsupportedPatternError, and the caller uses the library.
"""

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from re import _parser  # type: ignore[attr-defined]  # private, but the parser of every Python since 3.11
from typing import Any

import numpy as np

from megatron.tokenizer.code_points import N_CODE_POINTS, load_folds, load_property, load_table

MAX_REPEATS = 64
FOLDED_PAIRS = ("ss", "st", "ff", "fi", "fl")  # these match one character (sharp s, ligatures) under (?i)
PLACEHOLDER = 0x100000  # private characters from here on stand for the properties of a pattern
ESCAPE = re.compile(
    r"\\(?:(?P<kind>[pP])\{(?P<not>\^?)(?P<name>\w+)\}|x\{(?P<hex>[0-9a-fA-F]+)\}|x[0-7][0-9a-fA-F]"
    r"|u[0-9a-fA-F]{4}|[sSdDnrtfva]|\W|_|(?P<other>.?))",
    re.DOTALL,
)
CLASS = re.compile(r"\[\^?[^\]]+\]")
# where escapes and classes are dots: quantifiers and groups that the two read differently
DIFFERENCES = re.compile(r"\}[?+*{]|\{(?!\d+(?:,\d*)?\})|\(\?P")


class UnsupportedPatternError(ValueError):
    """A pattern that this module does not compile."""


@dataclass(frozen=True, eq=False)
class Chars:
    """One character of a set; `members` is bool [0x110000]."""

    members: np.ndarray


@dataclass(frozen=True)
class Concat:
    """Nodes one after the other; empty: the empty text."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True)
class Alternatives:
    """The first node that leads to a match."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """A node `low` to `high` times, None: without limit."""

    node: "Node"
    low: int
    high: int | None
    greedy: bool = True


@dataclass(frozen=True, eq=False)
class LookAhead:
    """A condition on the next character: one of `members`, or the end of the text if `at_end`."""

    members: np.ndarray
    at_end: bool


Node = Chars | Concat | Alternatives | Repeat | LookAhead


def parse_split_pattern(pattern: str) -> Node:
    """Return the syntax tree of a pattern. Raises UnsupportedPatternError."""
    reader = _Reader(pattern)
    text = ESCAPE.sub(reader.replace_escape, pattern)
    bare = ESCAPE.sub(".", pattern)
    if any("[" in found[1:] for found in CLASS.findall(bare)) or re.search(r"\[\^?\]", bare):
        raise reader.error("a class of classes or an empty one")
    if DIFFERENCES.search(CLASS.sub(".", bare)) or max(pattern, default="") >= chr(PLACEHOLDER):
        raise reader.error("a quantifier, group or character of another form")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Python warns about `&&` and `--` in classes
            parsed = _parser.parse(text)
    except (re.error, Warning, OverflowError, RecursionError) as error:
        raise reader.error(str(error)) from error
    if parsed.state.flags != re.UNICODE:
        raise reader.error("flags for the whole pattern")
    return reader.convert(parsed, ignore_case=False)


def literal_pattern(text: str) -> Node:
    """Return the syntax tree of a text."""
    return Concat(tuple(Chars(_members(ord(letter))) for letter in text))


def _members(*points: int) -> np.ndarray:
    members = np.zeros(N_CODE_POINTS, dtype=bool)
    members[list(points)] = True
    return members


class _Reader:
    """Conversion of the tree of Python's parser. `properties`: the sets of the placeholders."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.properties = pattern, list[np.ndarray]()

    def error(self, what: str) -> UnsupportedPatternError:
        return UnsupportedPatternError(f"{what} in the pattern {self.pattern}")

    def replace_escape(self, match: re.Match[str]) -> str:
        """Return a placeholder for a property, and other escapes as Python writes them."""
        if match["other"] is not None:
            raise self.error(f"the escape {match[0]}")
        if match["hex"] is not None:
            if int(match["hex"], 16) >= PLACEHOLDER:
                raise self.error("a number beyond Unicode")
            return re.escape(chr(int(match["hex"], 16)))
        if match["kind"] is None:
            return match[0]
        members = load_property(match["name"])
        if members is None:
            raise self.error(f"property {match['name']}")
        is_negated = bool(match["not"]) != (match["kind"] == "P")
        self.properties.append(~members if is_negated else members)
        return chr(PLACEHOLDER + len(self.properties) - 1)

    def convert(self, parsed: Iterable[tuple[Any, Any]], ignore_case: bool) -> Node:
        """Return the node of a sequence."""
        nodes = [self._convert_item(kind.name, value, ignore_case) for kind, value in parsed]
        if ignore_case:
            for first, second in zip(nodes, nodes[1:], strict=False):
                self._refuse_folded_pair(first, second)
        return nodes[0] if len(nodes) == 1 else Concat(tuple(nodes))

    def _refuse_folded_pair(self, first: Node, second: Node) -> None:
        """Refuse two nodes that may match a ligature as one character."""
        for pair in FOLDED_PAIRS:
            # a node of several characters may end or begin with any letter
            may_begin = not isinstance(first, Chars) or first.members[ord(pair[0])]
            if may_begin and (not isinstance(second, Chars) or second.members[ord(pair[1])]):
                raise self.error("letters that match a ligature without regard to case")

    def _convert_item(self, kind: str, value: Any, ignore_case: bool) -> Node:
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return Chars(self._read_set(kind, value, ignore_case))
            case "BRANCH":
                return Alternatives(tuple(self.convert(part, ignore_case) for part in value[1]))
            case "SUBPATTERN":
                _, added_flags, removed_flags, inner = value
                if removed_flags or added_flags & ~re.IGNORECASE:
                    raise self.error("a group with flags")
                return self.convert(inner, ignore_case or bool(added_flags))
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                low, high, inner = value
                node = self.convert(inner, ignore_case)
                limit = None if high == _parser.MAXREPEAT else int(high)
                if isinstance(node, LookAhead) or ignore_case:
                    raise self.error("a quantifier of a condition or without regard to case")
                if max(low, limit or 0) > MAX_REPEATS or limit == 0:
                    raise self.error(f"a quantifier above {MAX_REPEATS} or without a match")
                if kind == "POSSESSIVE_REPEAT":
                    return self._make_possessive(node, low, limit)
                return Repeat(node, low, limit, greedy=kind == "MAX_REPEAT")
            case "ASSERT" | "ASSERT_NOT":
                direction, inner = value
                node = self.convert(inner, ignore_case)
                if direction < 0 or not isinstance(node, Chars):
                    raise self.error("a look-behind, or a look-ahead of more than one character")
                return LookAhead(node.members ^ (kind == "ASSERT_NOT"), at_end=kind == "ASSERT_NOT")
            case "AT" if value.name == "AT_END":
                return LookAhead(_members(ord("\n")), at_end=True)
        raise self.error(f"{kind.lower()} of another form")

    def _make_possessive(self, node: Node, low: int, high: int | None) -> Node:
        """Return X*+ as X*(?!X), and X?+ as X|(?!X): without backtracking, no X follows a match."""
        if not isinstance(node, Chars):
            raise self.error("a possessive group")
        no_more = LookAhead(~node.members, at_end=True)
        if high == 1:
            return Alternatives((node, no_more))
        return Concat((Repeat(node, low, high), no_more))

    def _read_set(self, kind: str, value: Any, ignore_case: bool) -> np.ndarray:
        if kind == "ANY":
            return ~_members(ord("\n"))
        items = [(item.name, content) for item, content in value] if kind == "IN" else [("LITERAL", value)]
        is_negated = kind == "NOT_LITERAL" or items[0][0] == "NEGATE"
        members = np.zeros(N_CODE_POINTS, dtype=bool)
        for name, content in items:
            if name != "NEGATE":
                members |= self._read_set_item(name, content)
        if ignore_case:
            if is_negated or members[128:].any():
                raise self.error("a class of this kind, or a character beyond ASCII, without regard to case")
            members = _fold(members)
        return ~members if is_negated else members

    def _read_set_item(self, name: str, content: Any) -> np.ndarray:
        if name == "LITERAL":
            return _members(content) if content < PLACEHOLDER else self.properties[content - PLACEHOLDER]
        if name == "RANGE" and content[1] < PLACEHOLDER:
            return _members(*range(content[0], content[1] + 1))
        categories = {"SPACE": load_table("space") == 1, "DIGIT": load_property("Nd")}
        _, *negation, category = getattr(content, "name", "").split("_") if name == "CATEGORY" else ("", "")
        members = categories.get(category)
        if members is None:
            raise self.error(f"{name.lower()} {content} of another form")
        return ~members if negation else members


def _fold(members: np.ndarray) -> np.ndarray:
    """Add the characters that match an ASCII set without regard to case."""
    folds = load_folds()
    folded = members.copy()
    for lower in map(chr, range(ord("a"), ord("z") + 1)):
        points = [ord(lower), ord(lower.upper()), *folds.get(lower, [])]
        folded[points] |= members[points].any()
    return folded
