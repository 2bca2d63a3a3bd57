r"""Parser of the regular expressions that split text into words, as in tokenizer.json.

Oniguruma's syntax, of which these parts are supported: literals, escapes, classes with ranges and \p{..},
alternatives, groups, (?i:..), greedy and lazy quantifiers, possessive ones of a single class, and the
conditions (?=.), (?!.) and $ on one character. Everything else raises UnsupportedPatternError, and the caller
uses the library.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron.tokenizer.code_points import N_CODE_POINTS, load_folds, load_property, load_table

CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b"}
MAX_REPEATS = 64
FOLDED_PAIRS = ("ss", "st", "ff", "fi", "fl")  # these match one character (sharp s, ligatures) under (?i)


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
    parser = _Parser(pattern)
    node = parser.parse_alternatives()
    if parser.at < len(pattern):
        raise parser.error("an unmatched parenthesis")
    return node


def literal_pattern(text: str) -> Node:
    """Return the syntax tree of a text."""
    return Concat(tuple(Chars(_members(ord(letter))) for letter in text))


def _members(*points: int) -> np.ndarray:
    members = np.zeros(N_CODE_POINTS, dtype=bool)
    members[list(points)] = True
    return members


def _class_of_escape(letter: str) -> np.ndarray | None:
    kinds: dict[str, Callable[[], np.ndarray]] = {
        "s": lambda: load_table("space") == 1,
        "d": lambda: _property("Nd"),
    }
    if letter.lower() not in kinds:
        return None
    members = kinds[letter.lower()]()
    return ~members if letter.isupper() else members


def _property(name: str) -> np.ndarray:
    members = load_property(name)
    if members is None:
        raise UnsupportedPatternError(f"property {name}")
    return members


class _Parser:
    """Recursive descent; `at` is the position of the next character."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at, self.ignore_case = pattern, 0, False

    def error(self, what: str) -> UnsupportedPatternError:
        return UnsupportedPatternError(f"{what} at position {self.at} of {self.pattern}")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def accept(self, text: str) -> bool:
        if not self.peek(text):
            return False
        self.at += len(text)
        return True

    def take(self) -> str:
        if self.at == len(self.pattern):
            raise self.error("an incomplete pattern")
        self.at += 1
        return self.pattern[self.at - 1]

    def parse_alternatives(self) -> Node:
        nodes = [self.parse_concat()]
        while self.accept("|"):
            nodes.append(self.parse_concat())
        return nodes[0] if len(nodes) == 1 else Alternatives(tuple(nodes))

    def parse_concat(self) -> Node:
        nodes: list[Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            nodes.append(self.parse_quantified())
            if self.ignore_case:
                self._refuse_folded_pair(nodes[-2:])
        return nodes[0] if len(nodes) == 1 else Concat(tuple(nodes))

    def _refuse_folded_pair(self, nodes: list[Node]) -> None:
        if not all(isinstance(node, Chars) for node in nodes) or len(nodes) < 2:
            return
        first, second = (node.members for node in nodes if isinstance(node, Chars))
        if any(first[ord(pair[0])] and second[ord(pair[1])] for pair in FOLDED_PAIRS):
            raise self.error("letters that match a ligature without regard to case")

    def parse_quantified(self) -> Node:
        node = self.parse_atom()
        low, high = 1, 1
        is_counted = False
        if self.accept("?"):
            low, high = 0, 1
        elif self.accept("*"):
            low, high = 0, -1
        elif self.accept("+"):
            low, high = 1, -1
        elif self.peek("{"):
            low, high = self._parse_counts()
            is_counted = True
        else:
            return node
        limit = None if high < 0 else high
        if isinstance(node, LookAhead) or self.ignore_case:
            raise self.error("a quantifier of a condition or without regard to case")
        suffix = next((mark for mark in "?+" if self.accept(mark)), "")
        # Oniguruma reads {1,3}+ and {1,3}? as quantifiers of a quantifier, and a** as well
        if (suffix and is_counted) or any(self.peek(mark) for mark in ("?", "*", "+", "{")):
            raise self.error("two quantifiers")
        if suffix != "+":
            return Repeat(node, low, limit, greedy=suffix == "")
        return self._possessive(node, low, limit)

    def _possessive(self, node: Node, low: int, high: int | None) -> Node:
        """Return X*+ as X*(?!X), and X?+ as X|(?!X): without backtracking, no X follows a match."""
        if not isinstance(node, Chars):
            raise self.error("a possessive group")
        no_more = LookAhead(~node.members, at_end=True)
        if high == 1:
            return Alternatives((node, no_more))
        return Concat((Repeat(node, low, high), no_more))

    def _parse_counts(self) -> tuple[int, int]:
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at + 1 : max(end, self.at + 1)].partition(",")
        self.at = end + 1
        if not low.isdecimal() or not (high.isdecimal() or (comma and not high)):
            if comma or not low.isdecimal():
                raise self.error("a quantifier of another form")
            high = low
        counts = int(low), int(high) if high else -1
        if max(counts) > MAX_REPEATS or 0 <= counts[1] < counts[0] or counts[1] == 0:
            raise self.error(f"a quantifier above {MAX_REPEATS} or without a match")
        return counts

    def parse_atom(self) -> Node:
        letter = self.take()
        if letter == "(":
            return self._parse_group()
        if letter == "[":
            return Chars(self._parse_class())
        if letter == "\\":
            return Chars(self._parse_escape())
        if letter == ".":
            return Chars(~_members(ord("\n")))
        if letter == "$":
            return LookAhead(_members(ord("\n")), at_end=True)
        if letter in "^*+?{":
            raise self.error(f"the character {letter}")
        return Chars(self._literal(letter))

    def _literal(self, letter: str) -> np.ndarray:
        if not self.ignore_case:
            return _members(ord(letter))
        if not letter.isascii():
            raise self.error("a character beyond ASCII without regard to case")
        return self._fold(_members(ord(letter)))

    def _fold(self, members: np.ndarray) -> np.ndarray:
        """Add the characters that match an ASCII set without regard to case."""
        folds = load_folds()
        folded = members.copy()
        for lower in map(chr, range(ord("a"), ord("z") + 1)):
            points = [ord(lower), ord(lower.upper()), *folds.get(lower, [])]
            folded[points] |= members[points].any()
        return folded

    def _parse_group(self) -> Node:
        outer = self.ignore_case
        look: bool | None = None
        if self.accept("?"):
            if self.accept("=") or self.peek("!"):
                look = not self.accept("!")
            elif self.accept("i:"):
                self.ignore_case = True
            elif not self.accept(":"):
                raise self.error("a group of another kind")
        node = self.parse_alternatives()
        if not self.accept(")"):
            raise self.error("an unmatched parenthesis")
        self.ignore_case = outer
        if look is None:
            return node
        if not isinstance(node, Chars):
            raise self.error("a look-ahead of more than one character")
        return LookAhead(node.members if look else ~node.members, at_end=not look)

    def _parse_class(self) -> np.ndarray:
        is_negated = self.accept("^")
        members = np.zeros(N_CODE_POINTS, dtype=bool)
        if self.peek("]"):
            raise self.error("an empty class")
        while not self.accept("]"):
            if self.peek("[") or self.peek("&&"):
                raise self.error("a class of classes")
            members |= self._parse_class_item()
        if self.ignore_case:
            if is_negated or members[128:].any():
                raise self.error("a class of this kind without regard to case")
            members = self._fold(members)
        return ~members if is_negated else members

    def _parse_class_item(self) -> np.ndarray:
        first = self._class_element()
        is_range = self.peek("-") and not self.peek("-]")
        if not is_range:
            return first
        self.at += 1
        if self.peek("["):
            raise self.error("a class of classes")
        last = self._class_element()
        if first.sum() != 1 or last.sum() != 1:
            raise self.error("a range between classes")
        low, high = int(first.argmax()), int(last.argmax())
        if low > high:
            raise self.error("an empty range")
        return _members(*range(low, high + 1))

    def _class_element(self) -> np.ndarray:
        letter = self.take()
        return self._parse_escape() if letter == "\\" else _members(ord(letter))

    def _parse_escape(self) -> np.ndarray:
        letter = self.take()
        if letter in "pP":
            if not self.accept("{"):
                raise self.error("a property of another form")
            is_negated = self.accept("^") != (letter == "P")
            end = self.pattern.find("}", self.at)
            name = self.pattern[self.at : end]
            self.at = end + 1
            return ~_property(name) if is_negated else _property(name)
        if (members := _class_of_escape(letter)) is not None:
            return members
        if letter in CONTROLS:
            return _members(ord(CONTROLS[letter]))
        if letter in "xu":
            return _members(self._parse_hexadecimal(letter))
        if letter.isalnum() or not letter.isascii():
            raise self.error(f"the escape \\{letter}")
        return self._literal(letter)

    def _parse_hexadecimal(self, letter: str) -> int:
        if letter == "x" and self.accept("{"):
            end = self.pattern.find("}", self.at)
            digits = self.pattern[self.at : end]
            self.at = end + 1
        else:
            n = 4 if letter == "u" else 2
            digits = self.pattern[self.at : self.at + n]
            self.at += n
            if len(digits) < n or (letter == "x" and int(digits, 16) >= 128):
                raise self.error("a hexadecimal byte")  # Oniguruma takes \x80 and above as bytes of UTF-8
        try:
            point = int(digits, 16)
        except ValueError as error:
            raise self.error("a hexadecimal number") from error
        if point >= N_CODE_POINTS:
            raise self.error("a number beyond Unicode")
        return point
