"""Reader of YAML files: `yaml.SafeLoader` without aliases, with a limit on the size.

A file is data: tags of plain values alone, no environment variables, no functions. `${key}` and
`${section.key}` refer to words and numbers of the same file.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 4 << 20  # of a file
MAX_WORD = 4096  # letters of a value with references
MAX_INT = 2**63 - 1
TAG = "tag:yaml.org,2002:"
REFERENCE = re.compile(r"\$\{([\w-]+(?:\.[\w-]+)*)\}")


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.1 without dates; 1e6 is a number as in YAML 1.2; duplicate keys are errors."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node. Raises YAMLError for an anchor or alias: a small file could become large."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # of the stubs of PyYAML
        if name := getattr(event, "anchor", None):
            raise yaml.YAMLError(
                f"got the anchor or alias '{name}', expected none. Write the value out {event.start_mark}"
            )
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value. Raises YAMLError, with the place, for text that its type cannot have."""
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, KeyError, IndexError) as error:  # !!int x or 0x_; !!bool x; !!int ''
            expected = f"a value of type {node.tag.removeprefix(TAG)}"
            raise yaml.YAMLError(f"got {node.value[:40]!r}, expected {expected} {node.start_mark}") from error
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise yaml.YAMLError(f"got {node.value[:40]}, expected a number below 2^63 {node.start_mark}")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping. Raises YAMLError for a duplicate key or one that is not a scalar."""
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float) or key != key or key in keys:
                raise yaml.YAMLError(
                    f"got the key {key!r:.40}, expected different words {key_node.start_mark}"
                )
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


# PyYAML reads 1e6 as text, because YAML 1.1 requires a dot and a sign (1.0e+6). A date would become an object
# that is no setting. Both tables are copies: those of SafeLoader are shared by all its users.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (f"{TAG}float", f"{TAG}timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(TAG) in ("str", "int", "float", "bool", "null", "seq", "map")
}
_Loader.add_implicit_resolver(
    f"{TAG}float",
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
    """Return the keys of a YAML file with `key.key=value` overrides merged and references resolved.

    Raises FileNotFoundError, or ValueError for invalid YAML, a file without keys, or a reference to a key
    that has no word or number.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such configuration file")
    # one byte more than allowed, so that the size of a pipe or a growing file is limited too
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path}: got more than {MAX_BYTES >> 20} MiB, expected a configuration. Split it.")
    try:
        tree = load_yaml_text(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got bytes that are not UTF-8 ({error}). Save it as UTF-8.") from error
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: got {type(tree).__name__}, expected sections with keys")
    tree = merge_sections(tree, parse_overrides(overrides))
    try:
        return _resolve_references(tree, tree, "")
    except (ValueError, RecursionError) as error:
        message = "a reference refers to itself" if isinstance(error, RecursionError) else error
        raise ValueError(f"{path}: {message}") from error


def load_yaml_text(text: str, where: str) -> Any:
    """Return the value of YAML text. Raises ValueError, beginning with `where`, for invalid text."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError(f"{where}: got too many nested levels, expected fewer. Flatten it.") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter: an escape beyond Unicode
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return `a.b=value` words as nested sections. A value is YAML; an empty value is null."""
    tree: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        keys = name.split(".")
        if not sign or not all(keys) or len(keys) > 64:
            raise ValueError(f"'{word:.80}': expected section.key=value, for example optim.lr=3e-4")
        value = load_yaml_text(text, name)
        section = {keys.pop(): value}
        for key in reversed(keys):
            section = {key: section}
        tree = merge_sections(tree, section)
    return tree


def merge_sections(base: dict[Any, Any], over: dict[Any, Any], place: str = "") -> dict[Any, Any]:
    """Return `base` updated with the keys of `over`, section by section. Lists are replaced."""
    merged = dict(base)
    for key, value in over.items():
        inner = f"{place}{key}"
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, list):
            raise ValueError(f"{inner}: got keys, expected a list. Give the whole list: {inner}=[...].")
        both = isinstance(value, dict) and isinstance(before, dict)
        merged[key] = merge_sections(before or {}, value, f"{inner}.") if both else value
    return merged


def _resolve_references(value: Any, tree: dict[str, Any], place: str) -> Any:
    """Return a copy of a value with resolved references to `tree`. Raises ValueError with the key."""
    if isinstance(value, dict):
        return {key: _resolve_references(item, tree, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve_references(item, tree, f"{place}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    key = place.lstrip(".")

    def find(match: re.Match[str]) -> Any:
        target: Any = tree
        for name in match[1].split("."):
            target = target.get(name) if isinstance(target, dict) else None
        if target is None or isinstance(target, dict | list):
            raise ValueError(
                f"{key}: got {value!r:.200}, in which {match[1]} is no word or number of this file. "
                "Refer to a key that has one."
            )
        return _resolve_references(target, tree, place)

    # a reference alone keeps the type of its target; inside other text it becomes a string
    whole = REFERENCE.fullmatch(value)
    resolved = find(whole) if whole else REFERENCE.sub(lambda match: str(find(match)), value)
    if len(str(resolved)) > MAX_WORD:
        raise ValueError(f"{key}: got more than {MAX_WORD} letters with references, expected fewer")
    if "${" in str(resolved):
        raise ValueError(
            f"{key}: got {value!r:.200}, expected ${{key}} with a key of this file (no environment "
            f"variables, no functions). Let the shell expand it: {key}=$HOME/... on the command line."
        )
    return resolved


def is_single_line(text: str) -> bool:
    """Return whether a name or path has no line ends or control characters and can be encoded as UTF-8."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are not numbers."""
    return type(value) is int or isinstance(value, float) and math.isfinite(value)
