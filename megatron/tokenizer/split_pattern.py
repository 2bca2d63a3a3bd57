r"""Programs of the regular expressions that split text into words, as in tokenizer.json.

Python's parser of `re` reads the pattern. Its syntax and Oniguruma's, which
`tokenizers` uses, agree in these parts: literals, escapes, classes with
ranges, alternatives, groups, (?i:..), greedy, lazy and possessive quantifiers,
and the conditions (?=.), (?!.) and $ on one character. \p{..} becomes a
placeholder. Everything else, and all that the two read differently, raises
UnsupportedPatternError, and the caller uses the library.
"""

import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megatron.tokenizer.code_points import N_CODE_POINTS, load_folds, load_property, load_table

# The parser is private. With another Python the library encodes.
HAS_PARSER = (3, 11) <= sys.version_info[:2] <= (3, 13)
if HAS_PARSER:
    from re import _parser  # type: ignore[attr-defined]
MAX_REPEATS, MAX_PROGRAM = 64, 4000
SET_KINDS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
# without regard to case, "ss", "st", "ff", "fi" and "fl" match one
# character (sharp s, ligatures): no letter may follow s, f or a class
# in a group (?i:..)
FOLDED_GROUP = re.compile(r"\(\?i:([^()\\]*)\)")
FOLDED_PAIR = re.compile(r"[sf\]][^|]", re.IGNORECASE)
PLACEHOLDER = 0x100000  # private characters from here on stand for the properties of a pattern
ESCAPE = re.compile(
    r"\\(?:(?P<kind>[pP])\{(?P<not>\^?)(?P<name>\w+)\}|x\{(?P<hex>[0-9a-fA-F]+)\}|x[0-7][0-9a-fA-F]"
    r"|u[0-9a-fA-F]{4}|[sSdDnrtfva]|\W|_|(?P<other>.?))",
    re.DOTALL,
)
CLASS = re.compile(r"\[\^?[^\]]+\]")
# where escapes and classes are dots: quantifiers and groups that the
# two read differently
DIFFERENCES = re.compile(r"\}[?+*{]|\{(?!\d+(?:,\d*)?\})|\(\?P")


class UnsupportedPatternError(ValueError):
    """A pattern that this module does not compile."""


@dataclass
class Step:
    """An instruction: read a character (`chars`), test the next one (`look`), or go to all `targets`.

    `chars` and `look` are numbers of sets. `at_end`: the end of the text passes the test.
    """

    targets: list[int]
    chars: int = -1
    look: int = -1
    at_end: bool = False


class Program:
    """Instructions of a pattern for a backtracking matcher, and the sets that they test.

    steps   the last instruction is the match; the first of several targets is preferred
    sets    bool [0x110000] each
    """

    def __init__(self, pattern: str, named: Mapping[str, np.ndarray] | None = None) -> None:
        r"""`named`: sets in addition to the properties of Unicode. Raises UnsupportedPatternError."""
        self.pattern, self._named = pattern, named or {}
        self.steps: list[Step] = []
        self.sets: list[np.ndarray] = []
        self._numbers: dict[bytes, int] = {}  # number of each set, by its bits
        self._known_sets: dict[tuple[str, str, bool], np.ndarray] = {}  # by kind and content
        self._properties: list[np.ndarray] = []  # the sets of the placeholders
        self._emit(self._parse(), ignore_case=False)
        self.match = self._add(Step([]))

    def _parse(self) -> Any:
        """Return the tree of Python's parser."""
        if not HAS_PARSER:
            raise self.error(f"an untried parser of Python {sys.version_info[0]}.{sys.version_info[1]}")
        text, bare = ESCAPE.sub(self._replace_escape, self.pattern), ESCAPE.sub(".", self.pattern)
        if any("[" in members[1:] for members in CLASS.findall(bare)) or re.search(r"\[\^?\]", bare):
            raise self.error("a class of classes or an empty one")
        if DIFFERENCES.search(CLASS.sub(".", bare)) or max(self.pattern, default="") >= chr(PLACEHOLDER):
            raise self.error("a quantifier, group or character of another form")
        groups = [CLASS.sub("]", group) for group in FOLDED_GROUP.findall(self.pattern)]
        if len(groups) < self.pattern.count("(?i") or any(map(FOLDED_PAIR.search, groups)):
            raise self.error("letters that may match a ligature without regard to case")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # Python warns about `&&` and `--` in classes
                parsed = _parser.parse(text)
        except (re.error, Warning, OverflowError, RecursionError) as error:
            raise self.error(str(error)) from error
        if parsed.state.flags != re.UNICODE:
            raise self.error("flags for the whole pattern")
        return parsed

    def error(self, what: str) -> UnsupportedPatternError:
        return UnsupportedPatternError(f"{what} in the pattern {self.pattern}")

    def _replace_escape(self, match: re.Match[str]) -> str:
        """Return a placeholder for a property, and other escapes as Python writes them."""
        if match["other"] is not None:
            raise self.error(f"the escape {match[0]}")
        if match["hex"] is not None:
            if int(match["hex"], 16) >= PLACEHOLDER:
                raise self.error("a number beyond Unicode")
            return re.escape(chr(int(match["hex"], 16)))
        if match["kind"] is None:
            return match[0]
        members = self._named.get(match["name"], load_property(match["name"]))
        if members is None:
            raise self.error(f"property {match['name']}")
        is_negated = bool(match["not"]) != (match["kind"] == "P")
        self._properties.append(~members if is_negated else members)
        return chr(PLACEHOLDER + len(self._properties) - 1)

    def _add(self, step: Step) -> int:
        if len(self.steps) >= MAX_PROGRAM:
            raise self.error("too many instructions")
        self.steps.append(step)
        return len(self.steps) - 1

    def _add_set(self, members: np.ndarray) -> int:
        number = self._numbers.setdefault(np.packbits(members).tobytes(), len(self.sets))
        if number == len(self.sets):
            self.sets.append(members)
        return number

    def _emit(self, parsed: Any, ignore_case: bool) -> None:
        """Append the instructions of a sequence; the next instruction follows it."""
        for kind, value in parsed:
            self._emit_item(kind.name, value, ignore_case)

    def _find_set(self, parsed: Any, ignore_case: bool) -> np.ndarray | None:
        """Return the set of a sequence of one character, None for another sequence."""
        if len(parsed) != 1:
            return None
        kind, value = parsed[0]
        if kind.name == "SUBPATTERN" and not value[1]:
            return self._find_set(value[3], ignore_case)
        return self._read_set(kind.name, value, ignore_case) if kind.name in SET_KINDS else None

    def _emit_item(self, kind: str, value: Any, ignore_case: bool) -> None:
        if kind in SET_KINDS:
            self._emit_set(self._read_set(kind, value, ignore_case))
        elif kind == "BRANCH":
            self._emit_branch([partial(self._emit, part, ignore_case) for part in value[1]])
        elif kind == "SUBPATTERN":
            _, added_flags, removed_flags, inner = value
            if removed_flags or added_flags & ~re.IGNORECASE:
                raise self.error("a group with flags")
            self._emit(inner, ignore_case or bool(added_flags))
        elif kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and not ignore_case:
            self._emit_repeat(kind, *value)
        elif kind in ("ASSERT", "ASSERT_NOT"):
            members = self._find_set(value[1], ignore_case)
            if value[0] < 0 or members is None:
                raise self.error("a look-behind, or a look-ahead of more than one character")
            is_negated = kind == "ASSERT_NOT"
            self._emit_look(members ^ is_negated, at_end=is_negated)
        elif kind == "AT" and value.name == "AT_END":
            self._emit_look(_members(ord("\n")), at_end=True)
        else:
            raise self.error(f"{kind.lower()} of another form")

    def _emit_set(self, members: np.ndarray) -> None:
        self._add(Step([len(self.steps) + 1], chars=self._add_set(members)))

    def _emit_look(self, members: np.ndarray, at_end: bool) -> None:
        self._add(Step([len(self.steps) + 1], look=self._add_set(members), at_end=at_end))

    def _emit_branch(self, parts: Sequence[Callable[[], None]]) -> None:
        fork = self._add(Step([]))
        ends = []
        for emit in parts:
            self.steps[fork].targets.append(len(self.steps))
            emit()
            ends.append(self._add(Step([])))
        for end in ends:
            self.steps[end].targets = [len(self.steps)]

    def _emit_repeat(self, kind: str, low: int, high: Any, inner: Any) -> None:
        limit = None if high == _parser.MAXREPEAT else int(high)
        if max(low, limit or 0) > MAX_REPEATS or limit == 0:
            raise self.error(f"a quantifier above {MAX_REPEATS} or without a match")
        if len(inner) == 1 and inner[0][0].name in ("AT", "ASSERT", "ASSERT_NOT"):
            raise self.error("a quantifier of a condition")
        # X*+ is X*(?!X), and X?+ is X|(?!X): without backtracking, no X
        # follows a match
        if kind == "POSSESSIVE_REPEAT":
            members = self._find_set(inner, False)
            if members is None:
                raise self.error("a possessive group")
            no_more = ~members
            if limit == 1:
                self._emit_branch([lambda: self._emit_set(members), lambda: self._emit_look(no_more, True)])
                return
        for _ in range(low):
            self._emit(inner, False)
        forks = []
        for _ in range(1 if limit is None else limit - low):
            forks.append(self._add(Step([len(self.steps) + 1])))
            self._emit(inner, False)
        if limit is None:
            self._add(Step([forks[0]]))
        for fork in forks:
            into, out = self.steps[fork].targets[0], len(self.steps)
            self.steps[fork].targets = [out, into] if kind == "MIN_REPEAT" else [into, out]
        if kind == "POSSESSIVE_REPEAT":
            self._emit_look(no_more, at_end=True)

    def _read_set(self, kind: str, value: Any, ignore_case: bool) -> np.ndarray:
        key = (kind, str(value), ignore_case)
        if key not in self._known_sets:
            self._known_sets[key] = self._compute_set(kind, value, ignore_case)
        return self._known_sets[key]

    def _compute_set(self, kind: str, value: Any, ignore_case: bool) -> np.ndarray:
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
            return _members(content) if content < PLACEHOLDER else self._properties[content - PLACEHOLDER]
        if name == "RANGE" and content[1] < PLACEHOLDER:
            return _members(*range(content[0], content[1] + 1))
        _, *negation, category = content.name.split("_") if name == "CATEGORY" else ("", "")
        if category not in ("SPACE", "DIGIT"):
            raise self.error(f"{name.lower()} {content} of another form")
        members = load_table("space") == 1 if category == "SPACE" else load_property("Nd")
        assert members is not None, "Nd is a property"
        return ~members if negation else members


def _fold(members: np.ndarray) -> np.ndarray:
    """Add the characters that match an ASCII set without regard to case."""
    folds = load_folds()
    folded = members.copy()
    for lower in map(chr, range(ord("a"), ord("z") + 1)):
        points = [ord(lower), ord(lower.upper()), *folds.get(lower, [])]
        folded[points] |= members[points].any()
    return folded


def _members(*points: int) -> np.ndarray:
    members = np.zeros(N_CODE_POINTS, dtype=bool)
    members[list(points)] = True
    return members
