"""Automata that find the words of a split pattern, as a backtracking matcher finds them.

The states follow the method of RE2 and Rust's regex for leftmost-first matches: a state is an ordered list of
positions in the program, from the alternative that a backtracking matcher tries first to the last. A position
after a complete match ends the list, because no later one can win.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron.tokenizer.code_points import N_CODE_POINTS
from megatron.tokenizer.split_pattern import (
    Alternatives,
    Chars,
    Concat,
    LookAhead,
    Node,
    Repeat,
    UnsupportedPatternError,
)

MATCH_FLAG = 0x8000
MAX_STATES, MAX_CLASSES, MAX_PROGRAM = 200, 128, 4000


@dataclass(frozen=True)
class Automaton:
    """Deterministic automaton over classes of code points. State 0 is dead, state 1 the start.

    classes      uint8 [0x110000], the class of every code point
    transitions  uint16 [states, classes + 1]; the next state, and MATCH_FLAG if the text before this
                 character is a match. The last column is the end of the text.
    """

    classes: np.ndarray
    transitions: np.ndarray


@dataclass
class _Step:
    """An instruction: read a character (`chars`), test the next one (`look`), or go to all `targets`."""

    targets: list[int]
    chars: int = -1
    look: int = -1
    at_end: bool = False


class _Program:
    """Instructions of a pattern, and the sets that they test. The last instruction is the match."""

    def __init__(self, node: Node) -> None:
        self.steps: list[_Step] = []
        self.sets: list[np.ndarray] = []
        self._numbers: dict[bytes, int] = {}  # of the sets, by their bits
        self._emit(node)
        self.match = self._add(_Step([]))

    def _add(self, step: _Step) -> int:
        if len(self.steps) >= MAX_PROGRAM:
            raise UnsupportedPatternError("a pattern of this size")
        self.steps.append(step)
        return len(self.steps) - 1

    def _add_set(self, members: np.ndarray) -> int:
        number = self._numbers.setdefault(np.packbits(members).tobytes(), len(self.sets))
        if number == len(self.sets):
            self.sets.append(members)
        return number

    def _emit(self, node: Node) -> None:
        """Append the instructions of a node; the next instruction follows it."""
        match node:
            case Chars(members):
                self._add(_Step([len(self.steps) + 1], chars=self._add_set(members)))
            case LookAhead(members, at_end):
                self._add(_Step([len(self.steps) + 1], look=self._add_set(members), at_end=at_end))
            case Concat(nodes):
                for part in nodes:
                    self._emit(part)
            case Alternatives(nodes):
                fork = self._add(_Step([]))
                ends = []
                for part in nodes:
                    self.steps[fork].targets.append(len(self.steps))
                    self._emit(part)
                    ends.append(self._add(_Step([])))
                for end in ends:
                    self.steps[end].targets = [len(self.steps)]
            case Repeat():
                self._emit_repeat(node)

    def _emit_repeat(self, node: Repeat) -> None:
        for _ in range(node.low):
            self._emit(node.node)
        optional = 1 if node.high is None else node.high - node.low
        forks = []
        for _ in range(optional):
            forks.append(self._add(_Step([len(self.steps) + 1])))
            self._emit(node.node)
        if node.high is None:
            self._add(_Step([forks[0]]))
        for fork in forks:
            into, out = self.steps[fork].targets[0], len(self.steps)
            self.steps[fork].targets = [into, out] if node.greedy else [out, into]


def compile_automaton(node: Node) -> Automaton:
    """Compile a syntax tree. Raises UnsupportedPatternError for too many states or an empty match."""
    program = _Program(node)
    classes, members = _partition(program.sets)
    n_classes = members.shape[1]
    numbers: dict[tuple[int, ...], int] = {(): 0, (0,): 1}
    rows: list[list[int]] = []
    pending = [(), (0,)]
    for state in pending:  # grows while new states are found
        row = []
        for kind in range(n_classes + 1):
            following, is_match = _step(program, members, state, kind)
            if following not in numbers:
                numbers[following] = len(numbers)
                pending.append(following)
            row.append(numbers[following] | (MATCH_FLAG if is_match else 0))
        rows.append(row)
        if len(pending) > MAX_STATES:
            raise UnsupportedPatternError(f"a pattern of more than {MAX_STATES} states")
    if any(target & MATCH_FLAG for target in rows[1]):
        raise UnsupportedPatternError("a pattern that matches the empty text")
    return Automaton(classes, np.array(rows, dtype=np.uint16))


def _partition(sets: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (class of each code point, bool [sets, classes]): the code points that no set separates."""
    if not sets or len(sets) > 63:
        raise UnsupportedPatternError(f"a pattern of {len(sets)} sets")
    codes: np.ndarray = np.zeros(N_CODE_POINTS, dtype=np.uint32 if len(sets) <= 32 else np.uint64)
    for number, members in enumerate(sets):
        codes = codes | members.astype(codes.dtype) << codes.dtype.type(number)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1])  # of runs, of which there are few
    distinct, numbers = np.unique(codes[starts], return_inverse=True)
    if len(distinct) > MAX_CLASSES:
        raise UnsupportedPatternError(f"a pattern of {len(distinct)} classes")
    lengths = np.diff(np.append(starts, N_CODE_POINTS))
    member_of = (distinct[None, :] >> np.arange(len(sets), dtype=codes.dtype)[:, None] & 1).astype(bool)
    return np.repeat(numbers.astype(np.uint8), lengths), member_of


def _step(
    program: _Program, members: np.ndarray, state: tuple[int, ...], kind: int
) -> tuple[tuple[int, ...], bool]:
    """Return (next state, whether the text before this character is a match). `kind` may be the end."""
    is_end = kind == members.shape[1]
    following: dict[int, None] = {}  # ordered
    for position in _closure(program, members, state, kind, is_end):
        if position == program.match:
            return tuple(following), True
        step = program.steps[position]
        if not is_end and members[step.chars, kind]:
            following[step.targets[0]] = None
    return tuple(following), False


def _closure(
    program: _Program, members: np.ndarray, state: tuple[int, ...], kind: int, is_end: bool
) -> Iterator[int]:
    """Yield the reading instructions and the match that are reached before the next character, in order."""
    seen: set[int] = set()
    stack = list(reversed(state))
    while stack:
        position = stack.pop()
        if position in seen:
            continue  # reached before by a preferred way
        seen.add(position)
        step = program.steps[position]
        if step.chars >= 0 or position == program.match:
            yield position
        elif step.look < 0 or (step.at_end if is_end else members[step.look, kind]):
            stack.extend(reversed(step.targets))
