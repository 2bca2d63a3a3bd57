"""Configurations with a value of a wrong type for every key, for tests of all readers."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

READ_S = 20.0  # limit for reading one file on a busy machine; the slowest takes a second
Keys = Mapping[tuple[str, ...], Sequence[str]]  # section -> its keys


def nest_values(depth: int) -> Any:
    """Return `depth` nested lists and sections."""
    value: Any = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


WRONG: list[Any] = [
    5, -1, 0, True, False, None, [], {}, float("nan"), float("inf"), -float("inf"), "", "x", " ", "\0",
    "a\nb", "..", "/", "${directory}", "${oc.env:HOME}", "${a", "${x}${y}", [[1]], [[[]]], {"a": {"b": 1}},
    [None], [True], [1, 1], ["x", "x"], [{}], {"": 1}, {5: 5}, {True: 2}, 10**9, 10**18, 10**30, -(10**30),
    1e308, 1e-308, 1.5, "9" * 5000, nest_values(30), nest_values(63), nest_values(200), "1e3", "null",
    "NOT " * 900 + "true", "os:system", "this:x", "inferred", {"weight": 1}, [{"where": 5, "weight": 1}],
    {"at": 0}, [{"at": float("nan"), "weights": None}], "7M", "425", 425,
]  # fmt: skip


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def generate_wrong_texts(base: Mapping[str, Any], keys: Keys, n_values: int, seed: int) -> Iterator[str]:
    """Yield YAML texts of `base` in which one key has another value: `n_values` texts for every key.

    A section in a list is its first entry's. The values include a section and a list.
    """
    rng = random.Random(seed)
    for place, names in keys.items():
        for name in names:
            for value in [{"a": {"b": 1}}, [[1]], *rng.sample(WRONG, n_values - 2)]:
                tree = copy.deepcopy(dict(base))
                section: Any = tree
                for part in place:
                    section = section.setdefault(part, {})
                    section = section[0] if isinstance(section, list) else section
                section[name] = copy.deepcopy(value)
                yield yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=10**6)


def read_refusal(read: Callable[[], Any]) -> str | None:
    """Return the message of the error that `read` raises, or None. Asserts that it is one sentence."""
    try:
        read()
    except (ValueError, OSError) as error:
        assert "\n" not in str(error) and str(error), repr(error)
        assert not isinstance(error, UnicodeError), repr(error)
        return str(error)
    return None
