"""Reader of untrusted YAML files with limits on their size.

A file is data: no tags except !!str, !!int, !!float and !!bool, no environment variables, no functions.
`${key}` and `${section.key}` refer to other keys of the same file. The expanded size of aliases and
references is counted before it is built, so that a small file cannot become a large value.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 4 << 20  # of a file, and of all text after references are resolved
MAX_NODES = 100_000  # keys and values, after aliases and references are expanded
MAX_DEPTH = 64  # of nested sections and lists, and of references to references
MAX_INT = 2**63 - 1

SCALAR_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool"))
FLOAT_TAG = "tag:yaml.org,2002:float"
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
KEY = re.compile(r"[\w-]+(?:\.[\w-]+)*")  # syntax of the key in a reference


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.1 without dates; 1e6 is a number as in YAML 1.2; duplicate keys are errors."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value. Raises ConstructorError, with the place, for text that its type cannot have."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError, IndexError) as error:  # !!int x or 0x_; !!bool x; !!int ''
            message = f"got {str(node.value)[:40]!r}, expected a value of type {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping. Raises ConstructorError for a duplicate key or one that is not a scalar."""
        keys: set[Any] = set()
        for key_node, _ in node.value:
            # keys that `<<` merges from an anchor may be overridden, so only the keys written in this mapping
            # are compared
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float) or key != key:
                raise yaml.constructor.ConstructorError(
                    "while reading keys",
                    node.start_mark,
                    "got a key that is not a word or number",
                    key_node.start_mark,
                )
            if key in keys:
                raise yaml.constructor.ConstructorError(
                    "while reading keys", node.start_mark, f"got duplicate key {key}", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep=deep)


# PyYAML reads 1e6 as text, because YAML 1.1 requires a dot and a sign (1.0e+6). A date would become an object
# that is no setting.
# a copy: the resolvers of SafeLoader are shared by all its users
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
    """Return the keys of a YAML file with `key.key=value` overrides merged and references resolved.

    Raises FileNotFoundError, or ValueError for invalid YAML, a file without keys, exceeded limits, or a
    reference to a missing key.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such configuration file")
    tree = load_yaml_file(path)
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: got {type(tree).__name__}, expected sections with keys")
    for word in overrides:
        tree = merge_sections(tree, parse_override(word))
    return _ReferenceExpander(tree, str(path)).value


def load_yaml_file(path: Path) -> Any:
    """Return the content of a YAML file with unresolved references; {} for an empty file."""
    # one byte more than allowed, so that the size of a pipe or a growing file is limited too
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path}: got more than {MAX_BYTES >> 20} MiB, expected a configuration. Split it.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got bytes that are not UTF-8 ({error}). Save it as UTF-8.") from error
    value = load_yaml_text(text, str(path))
    return {} if value is None else value


def load_yaml_text(text: str, where: str) -> Any:
    """Return the value of YAML text. Raises ValueError, beginning with `where`, for invalid text."""
    try:
        _check_size(text, where)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error
    except (ValueError, OverflowError) as error:  # of the scanner, from an escape beyond Unicode
        if str(error).startswith(where):
            raise
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error


def _check_size(text: str, where: str) -> None:
    """Count the nodes after alias expansion from the parser's events, without building any value.

    An alias counts as many nodes as its anchor, whose total is known when its collection ends.
    """
    n_nodes = 0
    n_of_anchor: dict[str, int] = {}
    # (anchor, nodes before it) of sections and lists that are not closed yet
    opened: list[tuple[str | None, int]] = []
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.AliasEvent):
            # an alias inside its own anchor is recursive: the anchor is not registered before it is closed
            if event.anchor not in n_of_anchor:
                raise ValueError(
                    f"{where}: got the alias *{event.anchor}, expected one of an earlier, complete value. "
                    "Write out the value."
                )
            # Example: ten levels of lists with ten aliases of the level below are 500 bytes and 10^10 values.
            # Here each alias costs one addition.
            n_nodes += n_of_anchor[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            tag = getattr(event, "tag", None)
            if tag is not None and tag not in SCALAR_TAGS:
                expected = "none or !!str, !!int, !!float or !!bool"
                raise yaml.YAMLError(f"got the tag {tag!r}, expected {expected} {event.start_mark}")
            n_nodes += 1
            if isinstance(event, yaml.ScalarEvent):
                if event.anchor is not None:
                    n_of_anchor[event.anchor] = 1
            else:
                opened.append((event.anchor, n_nodes - 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                # the collection itself and all that it contains
                n_of_anchor[anchor] = n_nodes - before
        if n_nodes > MAX_NODES:
            raise ValueError(
                f"{where}: got more than {MAX_NODES:,} values with aliases expanded, expected a "
                "configuration. Remove anchors and aliases, or split it."
            )
        if len(opened) > MAX_DEPTH:
            raise _depth_error(where)


def _depth_error(where: str) -> ValueError:
    return ValueError(f"{where}: got more than {MAX_DEPTH} nested levels, expected fewer. Flatten it.")


def parse_override(word: str) -> dict[str, Any]:
    """Return `a.b=value` as {a: {b: value}}. The value is YAML; an empty value is null."""
    name, sign, written = word.partition("=")
    keys = name.split(".")
    if not sign or not all(keys):
        raise ValueError(f"'{word}': expected section.key=value, for example optim.lr=3e-4")
    if len(keys) > MAX_DEPTH:
        raise _depth_error(f"'{name[:40]}...'")
    value = load_yaml_text(written, name)
    for key in reversed(keys):
        value = {key: value}
    return value


def merge_sections(base: dict[Any, Any], over: dict[Any, Any], place: str = "") -> dict[Any, Any]:
    """Return `base` updated with the keys of `over`, section by section. Lists are replaced."""
    merged = dict(base)
    for key, value in over.items():
        inner = f"{place}{key}"
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, list):
            raise ValueError(f"{inner}: got keys, expected a list. Give the whole list: {inner}=[...].")
        if isinstance(value, dict) and isinstance(before, dict):
            merged[key] = merge_sections(before, value, f"{inner}.")
        else:
            merged[key] = value
    return merged


class _ReferenceExpander:
    """Copy of a tree with resolved references: `value`. Raises ValueError if a limit is exceeded."""

    def __init__(self, tree: Any, where: str) -> None:
        self.tree, self.where = tree, where
        self.n_nodes = self.n_bytes = 0
        self.value = self._expand(tree, (), 0)

    def _expand(self, value: Any, place: tuple[str, ...], depth: int) -> Any:
        self.n_nodes += 1
        # The file was counted in _check_size, but a reference copies its target: `a: ${b}` repeated in a
        # section that is itself referenced multiplies the values again.
        if self.n_nodes > MAX_NODES or self.n_bytes > MAX_BYTES:
            raise ValueError(
                f"{self.where}: got more than {MAX_NODES:,} values or {MAX_BYTES >> 20} MiB with aliases "
                "and references expanded, expected a configuration. Write values out where they are used."
            )
        if depth > MAX_DEPTH:
            raise _depth_error(f"{self.where}: {'.'.join(place[:3])}...")
        if isinstance(value, dict):
            return {key: self._expand(item, (*place, str(key)), depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [self._expand(item, (*place, str(i)), depth + 1) for i, item in enumerate(value)]
        if isinstance(value, str):
            self.n_bytes += len(value)
            return self._fill_in(value, place, depth) if "${" in value else value
        if isinstance(value, int) and abs(value) > MAX_INT:
            raise ValueError(
                f"{self.where}: {'.'.join(place)}: got a number of {value.bit_length()} bits, expected one "
                "below 2^63. Write a smaller one."
            )
        return value

    def _fill_in(self, text: str, place: tuple[str, ...], depth: int) -> Any:
        whole_text = REFERENCE.fullmatch(text)
        # a reference alone keeps the type of its target; inside other text it becomes a string
        if whole_text is not None:
            return self._resolve_reference(whole_text[1], text, place, depth)
        # nested or unterminated references such as ${${b}} or ${b leave a "${" after the substitution
        if "${" in REFERENCE.sub("", text):
            raise self._reference_error(text, place)

        def replace_reference(match: re.Match[str]) -> str:
            target = self._resolve_reference(match[1], text, place, depth)
            if target is None or isinstance(target, dict | list):
                raise ValueError(
                    f"{self.where}: {'.'.join(place)}: got {text!r}, in which {match[1]} is "
                    f"{type(target).__name__}, expected a word or number. Refer to a key that has one."
                )
            self.n_bytes += len(str(target))
            return str(target)

        return REFERENCE.sub(replace_reference, text)

    def _resolve_reference(self, name: str, text: str, place: tuple[str, ...], depth: int) -> Any:
        if not KEY.fullmatch(name):
            raise self._reference_error(text, place)
        target = self.tree
        for key in name.split("."):
            try:
                target = target[int(key) if isinstance(target, list) else self._match_key(target, key)]
            except (KeyError, IndexError, TypeError, ValueError, yaml.YAMLError):
                raise ValueError(
                    f"{self.where}: {'.'.join(place)}: got {text!r}, expected a reference to a key of this "
                    f"file. '{name}' is none."
                ) from None
        # the depth counts references too, so a cycle (a: ${b}, b: ${a}) ends at MAX_DEPTH with an error
        return self._expand(target, place, depth + 1)

    @staticmethod
    def _match_key(section: Any, key: str) -> Any:
        """Return a key with its type in the section: YAML reads 7 as int, true as bool. Raises KeyError."""
        if not isinstance(section, dict):
            raise KeyError(key)
        # ${sizes.7}: the text "7" is not a key of {7: ...}, but YAML reads it as the same int
        return key if key in section else yaml.load(key, _Loader)

    def _reference_error(self, text: str, place: tuple[str, ...]) -> ValueError:
        key = ".".join(place)
        return ValueError(
            f"{self.where}: {key}: got {text!r}, expected ${{key}} with a key of this file (no environment "
            f"variables, no functions). Let the shell expand it: {key}=$HOME/... on the command line."
        )


def is_single_line(text: str) -> bool:
    """Return whether a name or path has no line ends or control characters and can be encoded as UTF-8."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in text)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are not numbers."""
    return type(value) is int or isinstance(value, float) and math.isfinite(value)
