"""Megatron's arguments: the table utils/megatron_arguments.tsv, and the reader of a command line.

A row of the table is an argument, the form of its value, Megatron's default,
the keys that it sets (with `=value` for a constant), its conversion,
and a note. Words of a conversion, in the order of their effect:

    needs:X       ignored without X: an argument, key, or key=value
    requires:X    refused without X
    old->new      a value here; * is any other value there
    *60 /lr       a number or another argument; * rounds down
    set_...       a rule of megatron_rules.py
    ignored, unsupported, preprocessing
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron.config.schema import RunConfig

PAGE = "examples_scaling/MIGRATE.md"
# a link to utils/megatron_arguments.tsv; a copy of it in a wheel
TABLE_FILE = Path(__file__).with_name("megatron_arguments.tsv")
REQUIRED = "required"
READERS = {"int": int, "float": float, "text": str}


@dataclass(frozen=True)
class Argument:
    """A row of the table."""

    section: str
    name: str
    form: str
    default: str
    keys: tuple[str, ...]
    conversion: tuple[str, ...]
    note: str

    def read_value(self, words: list[str]) -> Any:
        """Return the value of the words after the argument. Raises ValueError for a wrong form."""
        if self.form in ("list", "any"):
            return words
        expected = "no value" if self.form == "switch" else "one value"
        if len(words) != (self.form != "switch"):
            raise ValueError(f"--{self.name}: got {' '.join(words[:3]) or 'no value'}, expected {expected}")
        try:
            return READERS[self.form](words[0]) if words else True
        except ValueError:
            raise ValueError(f"--{self.name}: got {words[0]!r}, expected {self.form}") from None

    @property
    def default_value(self) -> Any:
        """Megatron's default; False for a switch, None if it is missing."""
        if self.form == "switch":
            return False
        return None if self.default in ("", REQUIRED) else self.read_value([self.default])

    @property
    def values(self) -> dict[str, str]:
        """Value there -> value here, of the `old->new` words."""
        return dict(word.split("->") for word in self.conversion if "->" in word)

    def list_conditions(self, kind: str) -> list[str]:
        """Return X of the words `kind:X`."""
        pairs = (word.partition(":") for word in self.conversion)
        return [condition for name, _, condition in pairs if name == kind]


@cache
def load_rows() -> tuple[Argument, ...]:
    """Return all rows of the table."""
    rows, section = [], ""
    for line in TABLE_FILE.read_text(encoding="utf-8").splitlines()[2:]:
        if line.startswith("# "):
            section = line[2:]
            continue
        name, form, default, keys, words, note = line.split("\t")
        rows.append(Argument(section, name, form, default, tuple(keys.split()), tuple(words.split()), note))
    return tuple(rows)


@cache
def load_table() -> Mapping[str, Argument]:
    """Return the arguments of training by name."""
    return {row.name: row for row in load_rows() if "preprocessing" not in row.conversion}


def find_argument(name: str) -> Argument | None:
    """Return the row of an argument, by its name without dashes at the start."""
    return load_table().get(name.replace("_", "-"))


def parse_arguments(words: list[str]) -> dict[str, Any]:
    """Return argument's name -> its value; the last of repeated ones counts.

    Raises ValueError for words that belong to no argument, and for
    values of a wrong number or type.
    """
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append((name, [value] if equals else []))
        elif groups:
            # a negative number such as -1 is a value; Megatron has no
            # argument with a single dash
            groups[-1][1].append(word)
        else:
            raise ValueError(f"got {word!r} before the first argument, expected --name value ...")
    given: dict[str, Any] = {}
    for name, values in groups:
        argument = find_argument(name)
        if argument is None:
            given[name] = values
        else:
            given[argument.name] = argument.read_value(values)
    return given


@dataclass
class Translation:
    """A translation: rules read arguments from it and set keys in it.

    given      argument -> value
    texts      absolute path -> content of files that a launch
               script writes, such as its DeepSpeed JSON
    ignored    given arguments without effect here
    refused    argument -> why it cannot be met
    commands   commands that make the datasets that the
               settings name, to be run before training
    notes      sentences on arguments without effect,
               and on a split of the model that is replaced
    deepspeed_json   content of a file to write beside the configuration
    """

    given: Mapping[str, Any]
    objective: str
    texts: Mapping[str, str]
    settings: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    deepspeed_json: str | None = None

    def explain_refusal(self) -> str:
        """Return a line with all refused arguments and the reasons; empty without refusals."""
        return "; ".join(f"--{name}: {reason}" for name, reason in self.refused.items())

    def has(self, *names: str) -> bool:
        """Return whether any of the arguments is given."""
        return any(name in self.given for name in names)

    def value(self, name: str) -> Any:
        """Return the value of an argument, else Megatron's default. Raises ValueError if it requires one."""
        argument = load_table()[name]
        if name not in self.given and argument.default == REQUIRED:
            raise ValueError(f"--{name}: missing. Megatron requires it, and so does the translation.")
        return self.given.get(name, argument.default_value)

    def get(self, key: str) -> Any:
        """Return the value of a key that was set."""
        section, _, name = key.rpartition(".")
        return (self.settings.get(section, {}) if section else self.settings).get(name)

    def set(self, key: str, value: Any, *names: str) -> None:
        """Set a key because of these arguments, given or not; a default of both sides is skipped."""
        section, _, name = key.rpartition(".")
        cls = RunConfig.__dataclass_fields__[section].type if section else RunConfig
        default = getattr(cls, name, None)  # the field's default is an attribute of its class
        if self.has(*names) or value != default or type(value) is not type(default):
            (self.settings.setdefault(section, {}) if section else self.settings)[name] = value

    def holds(self, condition: str) -> bool:
        """Return whether an argument is given, or a key is set; `key=value`: whether it has this value."""
        name, _, expected = condition.partition("=")
        if "." not in name:
            return self.has(name)
        return self.get(name) == expected if expected else bool(self.get(name))

    def apply(self, argument: Argument) -> None:
        """Set the keys of an argument whose conversion is data."""
        name = argument.name
        if not all(map(self.holds, argument.list_conditions("needs"))):
            self.ignored += [name] * self.has(name)
            return
        value = self.value(name)
        unmet = [x for x in argument.list_conditions("requires") if not self.holds(x)]
        if unmet and self.has(name):
            self.refused[name] = f"it requires {unmet[0]}"
            value = argument.default_value
        if argument.values and value is not None:
            translated = argument.values.get(str(value).lower(), argument.values.get("*"))
            if translated is None:
                self.refused[name] = f"use {' or '.join(argument.values)}"
                return
            value = yaml.safe_load(translated)
        if value in (None, "") or value is False and not argument.values:
            return
        for entry in argument.keys:
            key, _, constant = entry.partition("=")
            if not constant:
                self.set(key, self._calculate(argument, value), name)
            elif self.has(name):
                self.set(key, yaml.safe_load(constant), name)

    def _calculate(self, argument: Argument, value: Any) -> Any:
        """Return the value after the operations of the conversion, exactly: 2e-5 / 2e-4 is 0.1."""
        for word in argument.conversion:
            sign, operand = word[0], word[1:]
            if sign in "*/" and "->" not in word:
                number = Fraction(str(self.value(operand) if operand in load_table() else operand))
                exact = Fraction(str(value))
                value = int(exact * number) if sign == "*" else float(exact / number)
        return value
