"""Keys of a mixture's YAML file, read and checked as far as possible without the catalog."""

import re
from dataclasses import dataclass
from typing import Any

from megatron.config.option import REQUIRED, option
from megatron.config.section import check_known_keys, read_section, to_integer
from megatron.mixture.catalog.list_domains import LIST_DOMAINS
from megatron.mixture.distributor import DRY_POLICIES

RULES = ("ado", "loss")
RULE_CLASS = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*")  # custom rule: module:Class
SNAPSHOT_ID = re.compile(r"[0-9a-f]{8,64}")
POINTS = "a list of {at: 0, weights: ...}"


def _read_words(value: Any, name: str) -> list[str]:
    """Read a word or a list of different words."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"{name}: got {value!r}, expected a word or a list of words. Put numbers in quotes.")
    if repeated := next((word for word in words if words.count(word) > 1), None):
        raise ValueError(f"{name}: got {repeated!r} twice, expected different ones. Remove one of them.")
    return words


def _read_rule_name(value: Any, name: str) -> str:
    """Read the name of a rule, or module:Class of the user."""
    if value in RULES or isinstance(value, str) and RULE_CLASS.fullmatch(value):
        return value
    raise ValueError(f"{name}: got {value!r}, expected {' or '.join(RULES)}, or your module:Class.")


def _read_snapshot(value: Any, name: str) -> str:
    """Read the id of a snapshot, or its first digits."""
    if not isinstance(value, str) or not SNAPSHOT_ID.fullmatch(value):
        raise ValueError(
            f"{name}: got {value!r}, expected 8 to 64 hex digits in quotes. "
            "List the snapshots with tools/register_corpus.py CATALOG snapshots."
        )
    return value


@dataclass(frozen=True, kw_only=True)
class AdaptiveSettings:
    """Weights that follow the model; in mixtures of documents, a step is a chunk."""

    rule: str = option(REQUIRED, "rule of the weights", read=_read_rule_name)
    every_steps: int = option(10, "steps between two changes of the weights", at_least=1, unit="steps")
    delay_steps: int = option(8, "steps from a change to its first use", at_least=1, unit="steps")


@dataclass(frozen=True, kw_only=True)
class SchedulePoint:
    """Weights from a step or token on."""

    at: int = option(REQUIRED, "first step or token", at_least=0, unit="-", expected="an integer from 0")
    weights: Any = option(REQUIRED, "weights, see weights.py")


def _read_points(value: Any, name: str) -> list[SchedulePoint]:
    """Read the points of a schedule; a wrong point is shown whole."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: got {value!r}, expected {POINTS}")
    for point in value:
        check_known_keys(point, ("at", "weights"), name)
        at = to_integer(point.get("at"))
        if point.get("weights") is None or type(at) is not int or at < 0:
            raise ValueError(f"{name}: got {point}, expected {{at: an integer from 0, weights: ...}}.")
    return [read_section(SchedulePoint, point, f"{name}[{i}]") for i, point in enumerate(value)]


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Weights that change at given points of the run."""

    unit: str = option("steps", "unit of the points", "steps", "tokens")
    change: str = option("at_once", "change between two points", "at_once", "linear")
    points: list[SchedulePoint] = option(REQUIRED, "weights and where they begin", read=_read_points)

    def check(self, where: str) -> None:
        """Raise ValueError unless the first point is at 0 and the others rise."""
        starts = [point.at for point in self.points]
        if starts != sorted(set(starts)) or starts[0] != 0:
            raise ValueError(f"{where}: schedule.points: got at {starts}, expected 0 first and rising.")


@dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    """Documents of a mixture, the domains that they form, and the weights of the domains."""

    catalog: str = option(REQUIRED, "path of the catalog", expected="the path of a catalog.")
    snapshot: str | None = option(
        None, "stored snapshot of the catalog; default: current", read=_read_snapshot
    )
    corpora: list[str] = option([], "corpora of the catalog; default: all", read=_read_words)
    where: list[str] = option([], "conditions that documents satisfy", read=_read_words)
    by: list[str] = option([], "properties that define a domain", read=_read_words)
    list_domains: str = option("once", "domain of a document with several values", *LIST_DOMAINS)
    weights: Any = option(None, "weights, see weights.py; default: by size")
    count: str = option("tokens", "unit of the weights' shares", "tokens", "documents")
    schedule: ScheduleSettings | None = option(None, "weights that change at given points")
    adaptive: AdaptiveSettings | None = option(None, "weights that follow the model")
    dry: str = option("repeat", "what follows the last document of a domain", *DRY_POLICIES)
    shuffle: bool = option(True, "shuffle the documents of a domain", expected="one of True, False.")
    tokenizer: str | None = option(None, "tokenizer of text", expected="a name such as gpt2, or a folder.")


def read_mixture_settings(raw: Any, where: str) -> MixtureSettings:
    """Read the keys of the file `where`. Raises ValueError, prefixed by it, with the invalid key."""
    settings = read_section(MixtureSettings, raw, where, separator=": ")
    if settings.schedule is not None:
        if settings.adaptive is not None:
            raise ValueError(f"{where}: schedule and adaptive exclude each other. Remove one of them.")
        settings.schedule.check(where)
    return settings
