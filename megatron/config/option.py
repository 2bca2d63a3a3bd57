"""Declaration of a setting: a dataclass field that carries every fact about its key."""

import operator
import types
from collections.abc import Callable
from dataclasses import MISSING, Field, field
from typing import Any, Literal, Union, get_args, get_origin

# how a setting enters the identity of a run (plan/identity.py)
ALWAYS = "always"  # its value
IF_CHANGED = "if changed"  # its value unless it is the default: added after runs had identities
CONTENT = "content"  # the content of the files that it names
REQUIRED: Any = MISSING  # instead of a default: the key must be set
BOUNDS: dict[str, tuple[Callable[[float, Any], bool], str]] = {
    "above": (operator.gt, "more than {}"),
    "at_least": (operator.ge, "{} or more"),
    "below": (operator.lt, "less than {}"),
    "at_most": (operator.le, "{} or less"),
}


def option(
    default: Any,
    help_text: str = "",
    *choices: Any,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    unit: str = "",
    identity: str | None = None,
    needs: str = "",
    expected: str = "",
    read: Callable[[Any, str], Any] | None = None,
) -> Any:
    """Declare a setting: a dataclass field with its help text, `choices` and bounds.

    choices     valid values; default: the values of the type Literal
    unit        of a number; "-" for a number without unit
    identity    ALWAYS, IF_CHANGED or CONTENT; None: does not affect the losses
    needs       settings without which a value other than the default has
                no effect: "section.key=value", "section.key=value|value"
                or "section.key>number", separated by blanks
    expected    description of valid values in messages;
                default: from type, choices and bounds
    read        reader of a value with a form of its own:
                (value, name of the key) -> value of the field
    """
    # section.py and check.py check these facts, make_docs.py prints
    # them, and plan/identity.py hashes by them
    metadata = {
        "help": help_text, "choices": choices,
        "above": above, "at_least": at_least, "below": below, "at_most": at_most,
        "unit": unit, "identity": identity, "needs": needs, "expected": expected, "read": read,
    }  # fmt: skip
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def positive(default: Any, unit: str, **facts: Any) -> Any:
    """Declare a number above 0; `facts` as in `option`."""
    return option(default, above=0, unit=unit, **facts)


def share(default: Any, **facts: Any) -> Any:
    """Declare a share, 0 to 1; `facts` as in `option`."""
    return option(default, at_least=0, at_most=1, unit="share", **facts)


def split_type(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a field's type without None, and its choices: `Literal["a"] | None` -> (str, ("a",))."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    # unpacking one element: a key of two
    # types other than None fails here
    (kind,) = [kind for kind in kinds if kind is not types.NoneType]
    return (str, get_args(kind)) if get_origin(kind) is Literal else (kind, ())


def list_choices(key: Field[Any]) -> tuple[Any, ...]:
    """Return the valid values of a key, empty if it has no list of them."""
    return key.metadata["choices"] or split_type(key.type)[1]


def read_switch(value: Any, name: str) -> bool | None:
    """Read true, false or auto; auto is None, which lets the program decide. Raises ValueError otherwise."""
    if value == "auto" or value is None:
        return None
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}, expected auto, true or false")
    return value


def describe_bounds(key: Field[Any], value: float) -> str | None:
    """Return the expected range if a number is outside the bounds of its key, otherwise None."""
    bounds = [(name, key.metadata.get(name)) for name in BOUNDS]
    bounds = [(name, bound) for name, bound in bounds if bound is not None]
    if all(BOUNDS[name][0](value, bound) for name, bound in bounds):
        return None
    return " and ".join(BOUNDS[name][1].format(bound) for name, bound in bounds)
