"""Reader of one section: nested dictionaries into a frozen dataclass whose fields are declared by `option`.

Runs (read.py), studies and mixtures are read by this module, so that
unknown keys, wrong types, choices and bounds are refused alike: `<key>:
got X, expected Y`.
"""

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from megatron.config.option import describe_bounds, split_type
from megatron.config.presets import suggest_nearest
from megatron.config.yaml_file import MAX_INT, is_finite, is_single_line

MAX_FLOAT = 1e300  # largest magnitude of a setting, so that sums and products of settings are finite
PLURALS = {int: "integers", float: "numbers", str: "words of one line"}
Section = TypeVar("Section")


def check_known_keys(raw: Any, known_keys: Sequence[str], where: str) -> None:
    """Raise ValueError unless `raw` is a dictionary with known keys. Suggests the nearest known key."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {raw!r}, expected keys such as {', '.join(known_keys[:3])}")
    for key in raw:
        if key not in known_keys:
            place = f"{where}: " if where else ""
            raise ValueError(f"{place}unknown key '{key}'; {suggest_nearest(str(key), list(known_keys))}")


def list_keys(cls: Any) -> list[str]:
    """Return the keys of a section: its fields that are declared by `option`."""
    return [f.name for f in fields(cls) if f.metadata]


def read_section(cls: type[Section], raw: Any, where: str, separator: str = ".") -> Section:
    """Build a section from a dictionary. Raises ValueError with the key, from `where` on.

    null is not set, unless the type of the key includes it.
    """
    values = convert_keys(cls, raw, where, separator)
    by_name, hints = {f.name: f for f in fields(cls)}, get_type_hints(cls)  # type: ignore[arg-type]  # a dataclass
    for key in list_keys(cls):
        if key not in values and by_name[key].default is by_name[key].default_factory is MISSING:
            raise _refuse_value(f"{where}{separator}{key}", None, by_name[key], _describe_type(hints[key]))
    return cls(**values)


def convert_keys(cls: Any, raw: Any, where: str, separator: str = ".") -> dict[str, Any]:
    """Return the values of a dictionary in the types of a section. Raises as `read_section`."""
    check_known_keys(raw, list_keys(cls), where)
    by_name, hints = {f.name: f for f in fields(cls)}, get_type_hints(cls)
    return {
        key: convert_value(value, hints[key], by_name[key], f"{where}{separator}{key}")
        for key, value in raw.items()
        # null is a value of some keys: checkpoint.keep_last=null keeps all
        if value is not None or type(None) in get_args(hints[key])
    }


def convert_value(value: Any, hint: Any, field: Field[Any], name: str) -> Any:
    """Return `value` in the field's type. Converts only int to float, 1e9 to int, and numbers to str.

    name   of the key, for messages
    """
    if field.metadata["read"] is not None:
        return field.metadata["read"](value, name)
    if value is None and type(None) in get_args(hint):
        return None
    expected_type, choices = split_type(hint)
    if expected_type is Any:
        return value
    if get_origin(expected_type) is list:
        return _convert_list(value, expected_type, field, name)
    if is_dataclass(expected_type):
        return read_section(expected_type, value, name)  # type: ignore[arg-type]  # a class, no instance
    written, value = value, _convert_number(value, expected_type, field, name)
    if expected_type in (str, Path) and type(value) in (int, float):
        value = str(value)
    if expected_type in (str, Path) and type(value) is str and not is_single_line(value):
        raise ValueError(f"{name}: got {value!r}, expected one line. Remove control characters.")
    if expected_type is Path and type(value) is str and value:
        return Path(value)
    # `dict[str, Any]` is checked as dict: its keys belong to the reader
    # of another section
    if type(value) is not (get_origin(expected_type) or expected_type):
        raise _refuse_value(name, written, field, _describe_type(expected_type))
    choices = choices or field.metadata["choices"]
    if choices and value not in choices:
        raise _refuse_value(name, written, field, f"one of {', '.join(map(str, choices))}")
    if expected := describe_bounds(field, value):
        raise _refuse_value(name, written, field, expected)
    return value


def to_integer(value: Any) -> Any:
    """Convert a float that is an integer to int, since YAML reads 1e6 as a float."""
    # below 1e15 < 2^53 every whole float64
    # is exact, so the conversion loses nothing
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def _convert_number(value: Any, expected_type: Any, field: Field[Any], name: str) -> Any:
    """Return a number as int or float if the field has that type; other values unchanged."""
    # type() instead of isinstance(), because bool is a subclass of int
    if type(value) not in (int, float):
        return value
    if not (is_finite(value) and abs(value) <= MAX_FLOAT):
        default = field.default is not MISSING
        expected = f"a finite number{'. Remove the key for its default.' if default else ''}"
        raise _refuse_value(name, value, field, expected)
    if expected_type is float:
        return float(value)
    if expected_type is int and type(value) is float and value.is_integer():
        value = int(value)  # YAML reads 1e9 as a float
    if expected_type is int and type(value) is int and abs(value) > MAX_INT:
        raise _refuse_value(name, value, field, "a number below 2^63. Write a smaller one.")
    return value


def _convert_list(value: Any, expected_type: Any, field: Field[Any], name: str) -> list[Any]:
    (kind,) = get_args(expected_type)
    required = field.default is field.default_factory is MISSING
    if not isinstance(value, list) or required and not value:
        raise _refuse_value(name, value, field, _describe_type(expected_type))
    if is_dataclass(kind):
        # a class, no instance
        return [read_section(kind, item, f"{name}[{i}]") for i, item in enumerate(value)]  # type: ignore[arg-type]
    if kind is Any:
        return [to_integer(item) for item in value]
    items = [_convert_number(item, kind, field, name) for item in value]
    for written, item in zip(value, items, strict=True):
        if type(item) is not kind or kind is str and not is_single_line(item):
            raise ValueError(f"{name}: got {written!r}, expected {PLURALS[kind]}")
        if describe_bounds(field, item):  # for lists, only `above` is used
            raise ValueError(f"{name}: got {written!r}, expected numbers above {field.metadata['above']}")
    return items


def _describe_type(hint: Any) -> str:
    """Return the expected type in a message: a list of int, keys, true or false, or the type's name."""
    if get_origin(hint) is list:
        (kind,) = get_args(hint)
        return "a list" + ("" if kind is Any or is_dataclass(kind) else f" of {kind.__name__}")
    names: dict[object, str] = {bool: "true or false", dict: "keys", Path: "one line of text"}
    kind = get_origin(hint) or hint
    return names[kind] if kind in names else getattr(kind, "__name__", str(kind))


def _refuse_value(name: str, value: Any, field: Field[Any], expected: str) -> ValueError:
    """Return the error for a wrong value; `expected` of the declaration has precedence."""
    return ValueError(f"{name}: got {value!r}, expected {field.metadata['expected'] or expected}")
