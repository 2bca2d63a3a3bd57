"""Generator of configurations with random values of wrong types, for tests of all readers."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

READ_S = 20.0  # limit for reading one file on a busy machine; the slowest takes a second


def nest_values(depth: int) -> Any:
    """Return `depth` nested lists and sections."""
    value: Any = 1
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


WRONG: list[Any] = [
    5,
    -1,
    0,
    True,
    False,
    None,
    [],
    {},
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    " ",
    "\0",
    "a\nb",
    "..",
    "/",
    "${directory}",
    "${oc.env:HOME}",
    "${a",
    "${x}${y}",
    [[1]],
    [[[]]],
    {"a": {"b": 1}},
    [None],
    [True],
    [1, 1],
    ["x", "x"],
    [{}],
    {"": 1},
    {5: 5},
    {True: 2},
    10**9,
    10**18,
    10**30,
    -(10**30),
    1e308,
    1e-308,
    1.5,
    "9" * 5000,
    nest_values(30),
    nest_values(63),
    nest_values(200),
    "1e3",
    "null",
    "NOT " * 900 + "true",
    "os:system",
    "this:x",
    "inferred",
    {"weight": 1},
    [{"where": 5, "weight": 1}],
    {"at": 0},
    [{"at": float("nan"), "weights": None}],
    [{"at": 0, "weights": None}, {"at": 0, "weights": None}],
    "7M",
    "425",
    425,
]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def generate_wrong_texts(
    base: Mapping[str, Any], known_keys: Mapping[tuple[str, ...], Sequence[str]], n: int, seed: int
) -> Iterator[str]:
    """Yield `n` YAML texts of `base` with one to three values replaced or keys of `known_keys` added."""
    rng = random.Random(seed)
    for _ in range(n):
        tree = copy.deepcopy(dict(base))
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            _replace_value(tree, known_keys, rng)
        text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, width=10**6)
        if rng.random() < 0.1:  # duplicate a line
            lines = text.splitlines()
            lines.insert(rng.randrange(len(lines)), rng.choice(lines))
            text = "\n".join(lines)
        yield text


def _replace_value(
    node: Any, known_keys: Mapping[tuple[str, ...], Sequence[str]], rng: random.Random
) -> None:
    place: tuple[str, ...] = ()
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if isinstance(node, dict) and (not keys or rng.random() < 0.3):
            node[rng.choice(known_keys.get(place, ["x"]))] = copy.deepcopy(rng.choice(WRONG))
            return
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() > 0.75:
            node[key] = copy.deepcopy(rng.choice(WRONG))
            return
        place += () if isinstance(key, int) else (key,)
        node = node[key]


def read_refusal(read: Callable[[], Any]) -> str | None:
    """Return the message of the error that `read` raises, or None. Asserts that it is one sentence."""
    try:
        read()
    except (ValueError, OSError) as error:
        assert "\n" not in str(error) and str(error), repr(error)
        assert not isinstance(error, UnicodeError), repr(error)
        return str(error)
    return None
