"""Reader of YAML files: `yaml.SafeLoader` without aliases, with a limit on the size.

A file is data: tags of plain values alone, no environment variables,
no functions. `${key}` and `${section.key}` refer to words
and numbers of the same file, which have no references themselves.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 4 << 20  # largest accepted file
MAX_WORD = 4096  # letters of a value that is referred to
MAX_INT = 2**63 - 1
REFERENCE = re.compile(r"\$\{([\w-]+(?:\.[\w-]+)*)\}")


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.1 without dates; 1e6 is a number as in YAML 1.2; duplicate keys are errors."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node. Raises YAMLError for an anchor or alias: a small file could become large."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # untyped in PyYAML's stubs
        if name := getattr(event, "anchor", None):
            raise yaml.YAMLError(
                f"got the anchor or alias '{name}', expected none. Write the value out {event.start_mark}"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping. Raises YAMLError for a duplicate key or one that is not a scalar."""
        keys: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float) or key != key or key in keys:
                place = key_node.start_mark
                raise yaml.YAMLError(f"got the key {key!r:.40}, expected different words {place}")
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


# A date would become an object, not a setting. This table is a
# copy, because SafeLoader's is shared.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML reads 1e6 and -.5 as text, because YAML 1.1 requires a dot and
# a sign (1.0e+6).
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?)$"),
    list("-+0123456789."),
)


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys of a YAML file with `key.key=value` overrides merged and references resolved.

    Raises FileNotFoundError, or ValueError for invalid YAML, a file
    without keys, or a reference to a key that has no word or number.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such configuration file")
    # one byte more than allowed, so that the size of a pipe or a
    # growing file is limited too
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path}: got more than {MAX_BYTES >> 20} MiB, expected a configuration. Split it.")
    try:
        tree = load_yaml_text(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got bytes that are not UTF-8 ({error}). Save it as UTF-8.") from error
    if not isinstance(tree, dict | None):
        raise ValueError(f"{path}: got {type(tree).__name__}, expected sections with keys")
    tree = merge_sections(tree or {}, parse_overrides(overrides))
    try:
        return _resolve_references(tree, tree, "")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_yaml_text(text: str, where: str) -> Any:
    """Return the value of YAML text. Raises ValueError, beginning with `where`, for invalid text."""
    try:
        return yaml.load(text, _Loader)
    # beside YAMLError: a value that its tag cannot have, an escape
    # beyond Unicode, too many nested levels
    except (yaml.YAMLError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: got invalid YAML ({' '.join(str(error).split())})") from error


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Return `a.b=value` words as nested sections. A value is YAML; an empty value is null."""
    tree: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        keys = name.split(".")
        if not sign or not all(keys) or len(keys) > 64:
            raise ValueError(f"'{word:.80}': expected section.key=value, for example optim.lr=3e-4")
        section = load_yaml_text(text, name)
        for key in reversed(keys):
            section = {key: section}
        tree = merge_sections(tree, section)
    return tree


def merge_sections(base: dict[Any, Any], over: dict[Any, Any]) -> dict[Any, Any]:
    """Return `base` updated with the keys of `over`, section by section. Lists are replaced."""
    merged = base | over
    for key in base.keys() & over.keys():
        if isinstance(base[key], dict) and isinstance(over[key], dict):
            merged[key] = merge_sections(base[key], over[key])
    return merged


def _resolve_references(value: Any, tree: dict[str, Any], place: str) -> Any:
    """Return a copy of a value with resolved references to `tree`. Raises ValueError with the key."""
    if isinstance(value, dict):
        return {key: _resolve_references(item, tree, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve_references(item, tree, f"{place}.{i}") for i, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value
    # a reference alone keeps the type of its target; inside other text
    # it becomes a string
    if whole := REFERENCE.fullmatch(value):
        resolved = _find_target(whole[1], tree)
    else:
        resolved = REFERENCE.sub(lambda match: str(_find_target(match[1], tree)), value)
    if "${" in str(resolved):
        key = place.lstrip(".")
        raise ValueError(
            f"{key}: got {value!r:.200}, expected ${{key}} with a key of this file that has a short word or "
            f"a number. Let the shell expand other names: {key}=$HOME/... on the command line."
        )
    return resolved


def _find_target(name: str, tree: dict[str, Any]) -> Any:
    """Return the word or number at a dotted name; if it is missing "${", which no word may have."""
    target: Any = tree
    for key in name.split("."):
        target = target.get(key) if isinstance(target, dict) else None
    is_word = target is not None and not isinstance(target, dict | list) and len(str(target)) <= MAX_WORD
    return target if is_word else "${"


def is_single_line(text: str) -> bool:
    """Return whether a name or path has no line ends or control characters and can be encoded as UTF-8."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are not numbers."""
    return type(value) is int or isinstance(value, float) and math.isfinite(value)
