"""What the keys of a mixture's YAML file may be, as far as that is known without its catalog."""

import re
from typing import Any

from megatron.config.read import refuse_unknown
from megatron.config.yaml_file import MOST_INT, is_finite, is_one_line
from megatron.mixture.distributor import DRY

KEYS = ("catalog", "corpora", "where", "by", "weights", "count", "schedule", "adaptive", "dry", "shuffle")
OWN = (*KEYS, "tokenizer")
CHOICES = {"dry": DRY, "count": ("tokens", "documents"), "shuffle": (True, False)}
RULES = ("ado", "loss")
RULE_CLASS = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")  # module:Class of one's own
POINT = ("at", "weights")  # keys of one point of a schedule


def check_spec(spec: Any, where: str) -> None:
    """Raise ValueError, which begins with `where`, for a key that is not known or not of its type."""
    refuse_unknown(spec, OWN, where)
    catalog, tokenizer = spec.get("catalog"), spec.get("tokenizer")
    if not isinstance(catalog, str) or not catalog or not is_one_line(catalog):
        raise ValueError(f"{where}: catalog is {catalog!r}, wanted the path of a catalog")
    if tokenizer is not None and (not isinstance(tokenizer, str) or not is_one_line(tokenizer)):
        raise ValueError(f"{where}: tokenizer is {tokenizer!r}, wanted a name such as gpt2, or a folder")
    for key in ("corpora", "where", "by"):
        _check_words(spec.get(key), f"{where}: {key}")
    for key, known in CHOICES.items():
        if key in spec and not any(type(spec[key]) is type(one) and spec[key] == one for one in known):
            raise ValueError(f"{where}: {key} is {spec[key]!r}, wanted one of {', '.join(map(str, known))}")
    if spec.get("adaptive") is not None:
        _check_adaptive(spec["adaptive"], where)
    if spec.get("schedule") is not None:
        if spec.get("adaptive") is not None:
            raise ValueError(f"{where}: schedule and adaptive exclude each other; leave one out")
        _check_schedule(spec["schedule"], where)


def _check_words(value: Any, place: str) -> None:
    """ValueError for what is neither a word nor a list of different words; none is null."""
    words = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(
            f"{place}: got {value!r}, expected a word or a list of words. Put numbers in quotes."
        )
    if twice := next((word for word in words if words.count(word) > 1), None):
        raise ValueError(f"{place}: got {twice!r} twice, expected different ones. Remove one of them.")


def _check_adaptive(adaptive: Any, where: str) -> None:
    refuse_unknown(adaptive, ("rule", "every_steps", "delay_steps"), f"{where}: adaptive")
    rule = adaptive.get("rule")
    if rule not in RULES and not (isinstance(rule, str) and RULE_CLASS.fullmatch(rule)):
        raise ValueError(
            f"{where}: adaptive.rule is {rule!r}, wanted {' or '.join(RULES)}, or module:Class of your own"
        )
    for key in ("every_steps", "delay_steps"):
        n = adaptive.get(key, 1)
        if type(n) is not int or n < 1:
            raise ValueError(f"{where}: adaptive.{key} is {n!r}, wanted a number from 1")


def _check_schedule(schedule: Any, where: str) -> None:
    refuse_unknown(schedule, ("unit", "change", "points"), f"{where}: schedule")
    if schedule.get("unit", "steps") not in ("steps", "tokens"):
        raise ValueError(f"{where}: schedule.unit is {schedule['unit']!r}, wanted steps or tokens")
    if schedule.get("change", "at_once") not in ("at_once", "linear"):
        raise ValueError(f"{where}: schedule.change is {schedule['change']!r}, wanted at_once or linear")
    points = schedule.get("points")
    if not isinstance(points, list) or not points:
        raise ValueError(
            f"{where}: schedule.points: got {points!r}, expected a list of {{at: 0, weights: ...}}"
        )
    last: float = -1
    for point in points:
        refuse_unknown(point, POINT, f"{where}: schedule.points")
        at = point.get("at")
        whole = is_finite(at) and at == int(at) and 0 <= at <= MOST_INT
        if "weights" not in point or not whole:
            raise ValueError(
                f"{where}: schedule.points has {point}, wanted {{at: a whole number from 0, weights: ...}}"
            )
        if at <= last if last >= 0 else at != 0:
            raise ValueError(
                f"{where}: schedule: begins at {_ats(points)}, wanted 0 first and then later and later"
            )
        last = at


def _ats(points: list[Any]) -> list[Any]:
    return [point.get("at") if isinstance(point, dict) else point for point in points]
