"""Laws on disk: JSON that is written atomically and read with a check of the type of every field."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

LawType = TypeVar("LawType")


def is_number(value: Any) -> bool:
    """Return whether a value is an int or float that a float can hold, NaN and Inf included.

    A bool is not a number.
    """
    # type() and not isinstance, since a bool is an int;
    # JSON may hold 10^400, for which float() raises
    try:
        return type(value) in (int, float) and float(value) is not None
    except OverflowError:
        return False


def convert_value(name: str, value: Any, hint: Any) -> Any:
    """Return a value of JSON as `hint`: numbers as float, null as NaN, a list as a tuple of fixed length.

    Raises ValueError for a value of another type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is dict and isinstance(value, dict):
        return {key: convert_value(name, item, args[1]) for key, item in value.items()}
    if origin is list and isinstance(value, list):
        return [convert_value(name, item, args[0]) for item in value]
    if origin is tuple and isinstance(value, list) and len(value) == len(args):
        return tuple(convert_value(name, *item) for item in zip(value, args, strict=True))
    if origin is UnionType:  # T | None
        return None if value is None else convert_value(name, value, args[0])
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__") and isinstance(value, dict):
        return hint(**convert_fields(hint, value, prefix=f"{name}."))
    if hint is float and (value is None or is_number(value)):
        return math.nan if value is None else float(value)
    if hint is Any or (hint in (int, str, bool) and type(value) is hint):
        return value
    # the value is cut to 40 characters, since
    # replicates may be thousands of numbers
    expected = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise ValueError(f"{name}: got {str(value)[:40]!r}, expected {expected}")


def convert_fields(cls: type, stored: Any, skipped: tuple[str, ...] = (), prefix: str = "") -> dict[str, Any]:
    """Return the fields of dataclass `cls` that `stored` has, checked by their type hints.

    Raises ValueError for a field of another type,
    or a missing one without a default.
    """
    if not isinstance(stored, Mapping):
        raise ValueError(f"got {type(stored).__name__}, expected an object")
    hints, content = get_type_hints(cls), {}
    for entry in fields(cls):
        if entry.name in stored and entry.name not in skipped:
            content[entry.name] = convert_value(prefix + entry.name, stored[entry.name], hints[entry.name])
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{prefix}{entry.name}: got none, expected {hints[entry.name]}")
    return content


def require(name: str, is_valid: bool, expected: str) -> None:
    """Raise ValueError for field `name` of a law file unless it is valid."""
    if not is_valid:
        raise ValueError(f"{name}: got another value, expected {expected}")


def load_law(path: str | Path, kind: str, tool: str, build: Callable[[Any], LawType]) -> LawType:
    """Read a JSON file and build a law from its content.

    Raises FileNotFoundError, or ValueError that names
    the path for any content that `build` refuses.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: got no such file, expected {kind}. {tool} writes one.")
    try:
        return build(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"{path}: not {kind} ({reason}). Fit it again with {tool}.") from error
