"""Automata that find the words of a split pattern, as a backtracking matcher finds them.

The states follow the method of RE2 and Rust's regex for leftmost-first
matches: a state is an ordered list of positions in the program, from
the alternative that a backtracking matcher tries first to the last. A
position after a complete match ends the list, because no later one can
win.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megatron.tokenizer.code_points import N_CODE_POINTS
from megatron.tokenizer.split_pattern import Program, UnsupportedPatternError

MATCH_FLAG = 0x8000
MAX_STATES, MAX_CLASSES = 200, 128


@dataclass(frozen=True)
class Automaton:
    """Deterministic automaton over classes of code points. State 0 is dead, state 1 the start.

    classes      uint8 [0x110000], the class of every code point
    transitions  uint16 [states, classes + 1]; the next state, and MATCH_FLAG if the text
                 before this character is a match. The last column is the end of the text.
    """

    classes: np.ndarray
    transitions: np.ndarray


def compile_automaton(pattern: str, named: Mapping[str, np.ndarray] | None = None) -> Automaton:
    """Compile a pattern with properties `named`. Raises UnsupportedPatternError, also for an empty match."""
    program = Program(pattern, named)
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
    starts = np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1])  # one per run; runs are few
    distinct, numbers = np.unique(codes[starts], return_inverse=True)
    if len(distinct) > MAX_CLASSES:
        raise UnsupportedPatternError(f"a pattern of {len(distinct)} classes")
    lengths = np.diff(np.append(starts, N_CODE_POINTS))
    member_of = (distinct[None, :] >> np.arange(len(sets), dtype=codes.dtype)[:, None] & 1).astype(bool)
    return np.repeat(numbers.astype(np.uint8), lengths), member_of


def _step(
    program: Program, members: np.ndarray, state: tuple[int, ...], kind: int
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
    program: Program, members: np.ndarray, state: tuple[int, ...], kind: int, is_end: bool
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
