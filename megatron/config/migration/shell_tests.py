"""Truth of the conditions of bash's `if`, where it follows from known values."""

from collections.abc import Sequence

from megatron.config.migration.shell_words import UNKNOWN

NUMBERS = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}


def evaluate_test(words: Sequence[str]) -> bool | None:
    """Return the truth of `[ ... ]`, `[[ ... ]]`, `test ...`, `true` or `false`; None: not known.

    `words` are expanded; an empty value of quotes is an empty word.
    """
    if not words or any(UNKNOWN in word for word in words):
        return None
    if words[0] in ("true", "false"):
        return words[0] == "true"
    ends = {"[": "]", "[[": "]]"}
    if words[0] in ends:
        if words[-1] != ends[words[0]]:
            return None  # `[[ a && b ]]` reaches this function in parts
        words = words[1:-1]
    elif words[0] == "test":
        words = words[1:]
    else:
        return None
    if words and words[0] == "!":
        inner = _evaluate(words[1:])
        return None if inner is None else not inner
    return _evaluate(words)


def _evaluate(words: Sequence[str]) -> bool | None:
    if not words or words == ["-n"]:
        return False
    if words == ["-z"]:
        return True  # an unquoted empty variable leaves no word
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return (words[1] == "") == (words[0] == "-z")
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return (words[0] == words[2]) == (words[1] != "!=")
    if len(words) == 3 and words[1] in NUMBERS:
        try:
            left, right = int(words[0]), int(words[2])
        except ValueError:
            return None
        return {
            "==": left == right, "!=": left != right, ">": left > right,
            ">=": left >= right, "<": left < right, "<=": left <= right,
        }[NUMBERS[words[1]]]  # fmt: skip
    return None
