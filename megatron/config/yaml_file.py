"""YAML files of people and strangers, read within bounds.

A file is data: no tags, no environment, no functions. `${key}` and `${section.key}` refer to other keys of
the same file. What aliases and references expand to is counted before it is built, so that a small file
cannot become a large one.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 4 << 20  # of a file, and of all text after references are filled in
MOST_NODES = 100_000  # keys and values, after aliases and references are expanded
MOST_DEPTH = 64  # of sections and lists within one another, and of references to references
MOST_INT = 2**63 - 1

STRING_TAG = "tag:yaml.org,2002:str"
FLOAT_TAG = "tag:yaml.org,2002:float"
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
KEY = re.compile(r"[\w-]+(?:\.[\w-]+)*")  # of a reference


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without dates; 1e6 is a number, as in YAML 1.2; a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader's. ConstructorError for a key that stands twice, or is no word or number."""
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float) or key != key:
                raise yaml.constructor.ConstructorError(
                    "while reading keys", node.start_mark, "found a key that is no word", key_node.start_mark
                )
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    "while reading keys", node.start_mark, f"found duplicate key {key}", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag not in (FLOAT_TAG, "tag:yaml.org,2002:timestamp")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    FLOAT_TAG,
    re.compile(
        r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
               |[-+]?[0-9]+(?:_[0-9]+)*[eE][-+]?[0-9]+
               |[-+]?\.[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)?
               |[-+]?\.(?:inf|Inf|INF)
               |\.(?:nan|NaN|NAN))$""",
        re.X,
    ),
    list("-+0123456789."),
)


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys of a YAML file with `key.key=value` words merged over them, references filled in.

    Raises FileNotFoundError, or ValueError for what is not YAML, has no keys, exceeds the bounds of this
    module, or refers to what is not a key.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such configuration file")
    tree = load_file(path)
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: got {type(tree).__name__}, wanted sections with keys")
    for word in overrides:
        tree = merge(tree, parse_override(word))
    return _Expansion(tree, str(path)).value


def load_file(path: Path) -> Any:
    """Return what a YAML file contains, references as they are written; an empty file is {}."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path}: got more than {MOST_BYTES >> 20} MiB, expected a configuration. Split it.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got bytes that are not UTF-8 ({error}). Save it as UTF-8.") from error
    value = load_text(text, str(path))
    return {} if value is None else value


def load_text(text: str, where: str) -> Any:
    """Return the value of YAML text. ValueError, which begins with `where`, beyond the bounds."""
    try:
        _check_size(text, where)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    except ValueError as error:  # of a number: 0x_, or of thousands of digits
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error


def _check_size(text: str, where: str) -> None:
    """Count what aliases expand to, by the events of the parser, which builds nothing."""
    n_nodes = 0
    n_of_anchor: dict[str, int] = {}
    opened: list[
        tuple[str | None, int]
    ] = []  # (anchor, nodes before it) of sections and lists not yet closed
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in n_of_anchor:
                raise ValueError(
                    f"{where}: got the alias *{event.anchor}, expected one of an earlier, complete value. "
                    "Write the value out."
                )
            n_nodes += n_of_anchor[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            tag = getattr(event, "tag", None)
            if tag not in (None, STRING_TAG):
                raise ValueError(f"{where}: got the tag {tag!r}, expected plain values. Remove the tag.")
            n_nodes += 1
            if isinstance(event, yaml.ScalarEvent):
                if event.anchor is not None:
                    n_of_anchor[event.anchor] = 1
            else:
                opened.append((event.anchor, n_nodes - 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                n_of_anchor[anchor] = n_nodes - before
        if n_nodes > MOST_NODES:
            raise ValueError(
                f"{where}: got more than {MOST_NODES:,} values with aliases expanded, expected a "
                "configuration. Remove anchors and aliases, or split it."
            )
        if len(opened) > MOST_DEPTH:
            raise _too_deep(where)


def _too_deep(where: str) -> ValueError:
    return ValueError(
        f"{where}: got more than {MOST_DEPTH} levels within one another, expected fewer. Flatten it."
    )


def parse_override(word: str) -> dict[str, Any]:
    """Return `a.b=value` as {a: {b: value}}; the value is YAML, and none is null."""
    name, sign, written = word.partition("=")
    keys = name.split(".")
    if not sign or not all(keys):
        raise ValueError(f"'{word}': wanted section.key=value, for example optim.lr=3e-4")
    if len(keys) > MOST_DEPTH:
        raise _too_deep(f"'{name[:40]}...'")
    value = load_text(written, name)
    for key in reversed(keys):
        value = {key: value}
    return value


def merge(base: dict[Any, Any], over: dict[Any, Any], place: str = "") -> dict[Any, Any]:
    """Return `base` with the keys of `over` in it, section by section; lists are replaced."""
    merged = dict(base)
    for key, value in over.items():
        inner = f"{place}{key}"
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, list):
            raise ValueError(f"{inner}: got keys, expected a list. Give the whole list: {inner}=[...].")
        both = isinstance(value, dict) and isinstance(before, dict)
        merged[key] = merge(before, value, f"{inner}.") if both else value
    return merged


class _Expansion:
    """A copy of a tree with its references filled in: `value`. ValueError beyond the bounds."""

    def __init__(self, tree: Any, where: str) -> None:
        self.tree, self.where = tree, where
        self.n_nodes = self.n_bytes = 0
        self.value = self._expand(tree, (), 0)

    def _expand(self, value: Any, place: tuple[str, ...], depth: int) -> Any:
        self.n_nodes += 1
        if self.n_nodes > MOST_NODES or self.n_bytes > MOST_BYTES:
            raise ValueError(
                f"{self.where}: got more than {MOST_NODES:,} values or {MOST_BYTES >> 20} MiB with aliases "
                "and references expanded, expected a configuration. Write values out where they are used."
            )
        if depth > MOST_DEPTH:
            raise _too_deep(f"{self.where}: {'.'.join(place[:3])}...")
        if isinstance(value, dict):
            return {key: self._expand(one, (*place, str(key)), depth + 1) for key, one in value.items()}
        if isinstance(value, list):
            return [self._expand(one, (*place, str(i)), depth + 1) for i, one in enumerate(value)]
        if isinstance(value, str):
            self.n_bytes += len(value)
            return self._fill_in(value, place, depth) if "${" in value else value
        if isinstance(value, int) and abs(value) > MOST_INT:
            raise ValueError(
                f"{self.where}: {'.'.join(place)}: got a number of {value.bit_length()} bits, expected one "
                "below 2^63. Write a smaller one."
            )
        return value

    def _fill_in(self, text: str, place: tuple[str, ...], depth: int) -> Any:
        alone = REFERENCE.fullmatch(text)
        if alone is not None:
            return self._target(alone[1], text, place, depth)
        if "${" in REFERENCE.sub("", text):
            raise self._refused(text, place)

        def word(found: re.Match[str]) -> str:
            target = self._target(found[1], text, place, depth)
            if target is None or isinstance(target, dict | list):
                raise ValueError(
                    f"{self.where}: {'.'.join(place)}: got {text!r}, in which {found[1]} is "
                    f"{type(target).__name__}, expected a word or number. Refer to a key that has one."
                )
            self.n_bytes += len(str(target))
            return str(target)

        return REFERENCE.sub(word, text)

    def _target(self, name: str, text: str, place: tuple[str, ...], depth: int) -> Any:
        if not KEY.fullmatch(name):
            raise self._refused(text, place)
        found = self.tree
        for key in name.split("."):
            try:
                found = found[int(key) if isinstance(found, list) else self._key(found, key)]
            except (KeyError, IndexError, TypeError, ValueError, yaml.YAMLError):
                raise ValueError(
                    f"{self.where}: {'.'.join(place)}: got {text!r}, expected a reference to a key of this "
                    f"file. '{name}' is none."
                ) from None
        return self._expand(found, place, depth + 1)

    @staticmethod
    def _key(section: Any, key: str) -> Any:
        """A key as the section has it: YAML reads 7 and true as numbers and truth. KeyError for none."""
        if not isinstance(section, dict):
            raise KeyError(key)
        return key if key in section else yaml.load(key, _Loader)

    def _refused(self, text: str, place: tuple[str, ...]) -> ValueError:
        key = ".".join(place)
        return ValueError(
            f"{self.where}: {key}: got {text!r}, expected ${{key}} with a key of this file (no environment "
            f"variables, no functions). Let the shell fill it in: {key}=$HOME/... on the command line."
        )


def is_one_line(text: str) -> bool:
    """Whether a name or path has neither line ends nor control characters, and can be written as UTF-8."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text)


def is_finite(value: Any) -> bool:
    """Whether a value is a number, neither NaN nor infinite; true and false are no numbers."""
    return type(value) is int or isinstance(value, float) and math.isfinite(value)
