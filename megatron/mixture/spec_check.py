"""Checks of the keys of a mixture's YAML file that do not need the catalog."""

import re
from typing import Any

from megatron.config.read import check_known_keys
from megatron.config.yaml_file import MAX_INT, is_finite, is_single_line
from megatron.mixture.distributor import DRY_POLICIES

DOCUMENT_KEYS = (
    "catalog",
    "corpora",
    "where",
    "by",
    "weights",
    "count",
    "schedule",
    "adaptive",
    "dry",
    "shuffle",
)
SPEC_KEYS = (*DOCUMENT_KEYS, "tokenizer")
CHOICES = {"dry": DRY_POLICIES, "count": ("tokens", "documents"), "shuffle": (True, False)}
RULES = ("ado", "loss")
RULE_CLASS = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")  # custom rule: module:Class
POINT_KEYS = ("at", "weights")  # keys of one point of a schedule


def check_spec(spec: Any, where: str) -> None:
    """Raise ValueError, prefixed by `where`, for a key that is unknown or has a value of another type."""
    check_known_keys(spec, SPEC_KEYS, where)
    catalog, tokenizer = spec.get("catalog"), spec.get("tokenizer")
    if not isinstance(catalog, str) or not catalog or not is_single_line(catalog):
        raise ValueError(f"{where}: catalog: got {catalog!r}, expected the path of a catalog.")
    if tokenizer is not None and (not isinstance(tokenizer, str) or not is_single_line(tokenizer)):
        raise ValueError(f"{where}: tokenizer: got {tokenizer!r}, expected a name such as gpt2, or a folder.")
    for key in ("corpora", "where", "by"):
        _check_words(spec.get(key), f"{where}: {key}")
    for key, choices in CHOICES.items():
        # 1 == True in Python, so that the types must be equal too
        if key in spec and not any(
            type(spec[key]) is type(choice) and spec[key] == choice for choice in choices
        ):
            raise ValueError(
                f"{where}: {key}: got {spec[key]!r}, expected one of {', '.join(map(str, choices))}."
            )
    if spec.get("adaptive") is not None:
        _check_adaptive(spec["adaptive"], where)
    if spec.get("schedule") is not None:
        if spec.get("adaptive") is not None:
            raise ValueError(f"{where}: schedule and adaptive exclude each other. Remove one of them.")
        _check_schedule(spec["schedule"], where)


def _check_words(value: Any, place: str) -> None:
    """Raise ValueError unless the value is a word, a list of different words, or None."""
    words = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(
            f"{place}: got {value!r}, expected a word or a list of words. Put numbers in quotes."
        )
    if repeated := next((word for word in words if words.count(word) > 1), None):
        raise ValueError(f"{place}: got {repeated!r} twice, expected different ones. Remove one of them.")


def _check_adaptive(adaptive: Any, where: str) -> None:
    check_known_keys(adaptive, ("rule", "every_steps", "delay_steps"), f"{where}: adaptive")
    rule = adaptive.get("rule")
    if rule not in RULES and not (isinstance(rule, str) and RULE_CLASS.fullmatch(rule)):
        raise ValueError(
            f"{where}: adaptive.rule: got {rule!r}, expected {' or '.join(RULES)}, or your module:Class."
        )
    for key in ("every_steps", "delay_steps"):
        n = adaptive.get(key, 1)
        if type(n) is not int or n < 1:
            raise ValueError(f"{where}: adaptive.{key}: got {n!r}, expected an integer of at least 1.")


def _check_schedule(schedule: Any, where: str) -> None:
    check_known_keys(schedule, ("unit", "change", "points"), f"{where}: schedule")
    if schedule.get("unit", "steps") not in ("steps", "tokens"):
        raise ValueError(f"{where}: schedule.unit: got {schedule['unit']!r}, expected steps or tokens.")
    if schedule.get("change", "at_once") not in ("at_once", "linear"):
        raise ValueError(f"{where}: schedule.change: got {schedule['change']!r}, expected at_once or linear.")
    points = schedule.get("points")
    if not isinstance(points, list) or not points:
        raise ValueError(
            f"{where}: schedule.points: got {points!r}, expected a list of {{at: 0, weights: ...}}"
        )
    last: float = -1
    for point in points:
        check_known_keys(point, POINT_KEYS, f"{where}: schedule.points")
        at = point.get("at")
        # 1e6 is a float in YAML: a float is accepted if it is an integer
        whole = is_finite(at) and at == int(at) and 0 <= at <= MAX_INT
        if "weights" not in point or not whole:
            raise ValueError(
                f"{where}: schedule.points: got {point}, expected {{at: an integer from 0, weights: ...}}."
            )
        # (at <= last) if last >= 0 else (at != 0): the first point is at 0, and the others increase
        if at <= last if last >= 0 else at != 0:
            raise ValueError(
                f"{where}: schedule.points: got at {_list_starts(points)}, expected 0 first and rising."
            )
        last = at


def _list_starts(points: list[Any]) -> list[Any]:
    return [point.get("at") if isinstance(point, dict) else point for point in points]
