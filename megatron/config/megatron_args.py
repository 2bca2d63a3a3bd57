"""Megatron's arguments: the table utils/megatron_arguments.tsv, and the reader of a command line.

A row of the table is an argument, the form of its value, Megatron's default, the keys that it sets (with
`=value` for a constant), its conversion, and a note. Words of a conversion:

    as:NAME       another name of NAME
    needs:X       ignored without X: an argument, a key, key=value, objective=NAME, or several of these with |
    requires:X    refused without X
    excludes:NAME refused beside NAME
    old->new      a value here; * is any other value there, or the same value here
    *60 /60       a factor: a number, `batch` (samples of a step) or `lr`
    set_...       a rule of megatron_rules.py
    ignored, unsupported
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatron.config.schema import RunConfig

PAGE = "examples_scaling/MIGRATE.md"
TRANSLATED, IMPLIED, NO_EFFECT, UNSUPPORTED = OUTCOMES = (
    "translated",
    "implied",  # not given: the default of Megatron, which is another one here
    "no effect here",
    "not supported",
)
MISSING = object()
# a link to utils/megatron_arguments.tsv; a copy of it in a wheel
TABLE_FILE = Path(__file__).with_name("megatron_arguments.tsv")
REQUIRED = "required"
# an override such as optim.lr=1e-3, which a data path never looks like
OVERRIDE = re.compile(
    r"(dist|dataset|model|objective|optim|lr_scheduler|checkpoint|evaluation|logging|misc)\.\w+="
)
RANK_OPTIONS = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--nproc")
NODE_OPTIONS = ("--nnodes", "--num_nodes", "-N")


@dataclass(frozen=True)
class Argument:
    """A row of the table. A name that ends in `*` stands for all arguments that begin so.

    default  value of an argument that is not given; of an unsupported one: values that change nothing
    """

    section: str
    name: str
    form: str
    default: str
    keys: tuple[str, ...]
    conversion: tuple[str, ...]
    note: str

    def read_value(self, words: list[str]) -> Any:
        """Return the value of the words after the argument. Raises ValueError for a wrong form."""
        if self.form == "list":
            return words
        expected = 0 if self.form == "switch" else 1
        if len(words) != expected:
            got = f"{len(words)} values ({' '.join(words[:3])})" if words else "no value"
            raise ValueError(f"--{self.name}: got {got}, expected {expected or 'none'}")
        if self.form in ("switch", "bool"):
            # argparse's type=bool: every text except the empty one is true, also "False"
            return self.form == "switch" or bool(words[0])
        try:
            return {"int": int, "float": float, "text": str}[self.form](words[0])
        except ValueError:
            form = "a whole number" if self.form == "int" else "a number"
            raise ValueError(f"--{self.name}: got {words[0]!r}, expected {form}") from None

    @property
    def default_value(self) -> Any:
        """Megatron's default; False for a switch, None if there is none."""
        if self.form == "switch":
            return False
        return None if self.default in ("", REQUIRED) else self.read_value([self.default])

    @property
    def values(self) -> dict[str, str]:
        """Value there -> value here, of the `old->new` words."""
        pairs = (word.partition("->") for word in self.conversion if "->" in word)
        return {old: new for old, _, new in pairs}

    def list_conditions(self, kind: str) -> list[str]:
        """Return X of the words `kind:X`."""
        return [word.removeprefix(f"{kind}:") for word in self.conversion if word.startswith(f"{kind}:")]


@cache
def load_table() -> Mapping[str, Argument]:
    """Return the rows of the table by name."""
    rows, section = {}, ""
    for line in TABLE_FILE.read_text(encoding="utf-8").splitlines()[2:]:
        if line.startswith("# "):
            section = line[2:]
            continue
        name, form, default, keys, conversion, note = line.split("\t")
        rows[name] = Argument(
            section, name, form, default, tuple(keys.split()), tuple(conversion.split()), note
        )
    return rows


def find_argument(name: str) -> Argument | None:
    """Return the row of an argument, by its name without dashes at the start."""
    table, name = load_table(), name.replace("_", "-")
    families = (row for row in table.values() if row.name.endswith("*") and name.startswith(row.name[:-1]))
    argument = table.get(name) or next(families, None)
    for other in argument.list_conditions("as") if argument else ():
        return table[other]
    return argument


def suggest_argument(name: str) -> str:
    """Return a hint with the nearest argument of the table, or an empty string."""
    nearest = get_close_matches(name.replace("_", "-"), load_table(), 1)
    return f"did you mean --{nearest[0]}?" if nearest else ""


@dataclass(frozen=True)
class CommandLine:
    """A command line, split into its parts.

    given      argument's name -> its value, in the order of the words; the last of repeated ones counts
    typed      the same names -> the words as typed
    unknown    the names in `given` that are not in the table
    overrides  section.key=value words
    script     the .py file, or empty
    n_ranks    ranks that the launcher's options give; None: not given
    """

    given: dict[str, Any] = field(default_factory=dict)
    typed: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    script: str = ""
    n_ranks: int | None = None


def parse_command(words: Sequence[str]) -> CommandLine:
    """Split the words of a command, with or without launcher and script, into its parts.

    Raises ValueError for words that belong to no argument, and for values of a wrong number or type.
    """
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    start = 0 if place is None else place + 1
    command = CommandLine(
        overrides=[word for word in words[start:] if OVERRIDE.match(word)],
        script="" if place is None else words[place],
        n_ranks=_count_ranks(words[:start]),
    )
    for name, values in _group_words([word for word in words[start:] if not OVERRIDE.match(word)]):
        argument = find_argument(name)
        if argument is None:
            command.unknown.append(name)
        key = argument.name if argument and not argument.name.endswith("*") else name
        command.given.pop(key, None)  # a repeated argument moves to its last place
        command.given[key] = argument.read_value(values) if argument and argument.form != "any" else values
        command.typed[key] = f"--{name} {' '.join(values)}".rstrip()
    return command


def _group_words(words: list[str]) -> list[tuple[str, list[str]]]:
    """Return (argument's name, its values) of each argument."""
    groups: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append((name, [value] if equals else []))
        elif not groups:
            raise ValueError(f"got {word!r} before the first argument, expected --name value ...")
        else:
            # a negative number such as -1 is a value; Megatron has no argument with a single dash
            groups[-1][1].append(word)
    return groups


def _count_ranks(launcher: Sequence[str]) -> int | None:
    """Return ranks per node x nodes of a launcher's words, or None if it does not give them as numbers."""
    n_ranks, n_nodes = "", "1"
    words = [part for word in launcher for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for i, name in enumerate(words[:-1]):
        if name in RANK_OPTIONS:
            n_ranks = words[i + 1]
        elif name in NODE_OPTIONS:
            n_nodes = words[i + 1]
    return int(n_ranks) * int(n_nodes) if n_ranks.isdecimal() and n_nodes.isdecimal() else None


@dataclass(frozen=True)
class Row:
    """One line of the report: an argument, what becomes of it, and the settings or the reason."""

    argument: str
    outcome: str
    text: str


@dataclass
class Draft:
    """A translation under construction: rules read arguments from it and set keys in it.

    texts      absolute path -> content of files that a launch script writes, such as its DeepSpeed JSON
    unsplit    why zero3 replaces the split of the model over ranks; empty: the model is split
    sources    key -> the given arguments that set it
    notes      argument -> why it sets no key, or what is special about how it does
    refusals   argument -> why it cannot be met
    files      data-path files to write beside the configuration: name -> content; settings name them so
    commands   commands that make the datasets that the settings name, to be run before training
    """

    command: CommandLine
    objective: str
    n_ranks: int | None
    texts: Mapping[str, str]
    unsplit: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    implied: list[Row] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Return whether any of the arguments is given."""
        return any(name in self.command.given for name in names)

    def value(self, name: str) -> Any:
        """Return the value of an argument, else Megatron's default. Raises ValueError if it requires one."""
        if name in self.command.given:
            return self.command.given[name]
        argument = load_table()[name]
        if argument.default == REQUIRED:
            raise ValueError(f"--{name}: missing. Megatron requires it, and so does the translation.")
        return argument.default_value

    def get(self, key: str) -> Any:
        """Return the value of a key that was set."""
        section, _, name = key.rpartition(".")
        return (self.settings.get(section, {}) if section else self.settings).get(name)

    def set(self, key: str, value: Any, *names: str) -> None:
        """Set a key because of these arguments, given or not; a default of both sides is skipped."""
        given = [name for name in names if self.has(name)]
        section, _, name = key.rpartition(".")
        if not given:
            default = _find_default(section, name)
            if value == default and type(value) is type(default):
                return
            reason = f"--{names[0]} {load_table()[names[0]].default or 'absent'}" if names else "always there"
            self.implied.append(Row(f"({reason})", IMPLIED, f"{key}={_format_value(value)}"))
        (self.settings.setdefault(section, {}) if section else self.settings)[name] = value
        self.sources[key] = (*self.sources.get(key, ()), *given)

    def holds(self, condition: str) -> bool:
        """Return whether one of the conditions holds that `|` separates."""
        for word in condition.split("|"):
            key, _, value = word.partition("=")
            if key == "objective":
                state: Any = self.objective == value
            elif "." in key:
                state = self.get(key) == read_constant(value) if value else self.get(key)
            else:
                state = self.has(key) and self.value(key) != load_table()[key].default_value
            if state:
                return True
        return False

    def apply(self, argument: Argument) -> None:
        """Set the keys of an argument whose conversion is data."""
        name, default = argument.name, argument.default_value
        for condition in argument.list_conditions("needs"):
            if not self.holds(condition):
                self.notes[name] = f"without effect, as it requires {condition}"
                return
        value = self.value(name)
        if self.has(name) and value:
            missing = [x for x in argument.list_conditions("requires") if not self.holds(x)]
            refusals = [f"it requires {x.replace('|', ' or ')}" for x in missing]
            refusals += [f"it excludes --{x}" for x in argument.list_conditions("excludes") if self.has(x)]
            if refusals:
                self.refusals[name] = refusals[0]
                value = default
        if argument.values and value is not None:
            word = str(value[0] if isinstance(value, list) else value).lower()
            here = argument.values.get(word, argument.values.get("*"))
            if here is None:
                self.refusals[name] = f"use {' or '.join(argument.values)}"
                return
            value = value if here == "*" else read_constant(here)
        if value is None or value == "" or value is False and not argument.values:
            return
        for entry in argument.keys:
            key, equals, constant = entry.partition("=")
            if not equals or self.has(name):
                self.set(key, read_constant(constant) if equals else self._scale(argument, value), name)

    def _scale(self, argument: Argument, value: Any) -> Any:
        """Return the value times or by the factors of the conversion, exactly: 2e-5 / 2e-4 is 0.1."""
        known = {"batch": self.get("dataset.batch_size"), "lr": self.get("optim.lr")}
        for sign, word in (entry for entry in map(_split_factor, argument.conversion) if entry):
            factor = Fraction(str(known.get(word, word)))
            exact = Fraction(str(value)) * factor if sign == "*" else Fraction(str(value)) / factor
            value = int(exact) if argument.form == "int" and sign == "*" else float(exact)
        return value

    def list_rows(self) -> list[Row]:
        """Return the rows: arguments in their order, then defaults of Megatron, then what is missing."""
        rows = [self._make_row(name) for name in self.command.given]
        absent = [name for name in self.refusals if not self.has(name)]
        return [
            *rows,
            *self.implied,
            *(Row(f"(--{x} absent)", UNSUPPORTED, self.refusals[x]) for x in absent),
        ]

    def _make_row(self, name: str) -> Row:
        typed, argument = self.command.typed[name], find_argument(name)
        typed = typed if len(typed) <= 60 else f"{typed[:57]}..."
        if argument is None:
            hint = suggest_argument(name)
            return Row(typed, UNSUPPORTED, f"not in the table of {PAGE}{'; ' if hint else ''}{hint}")
        if name in self.refusals:
            return Row(typed, UNSUPPORTED, self.refusals[name])
        if "unsupported" in argument.conversion:
            is_harmless = " ".join(self.command.given[name]) in argument.default.split(",")
            if is_harmless and argument.default:
                return Row(typed, NO_EFFECT, "this value is the only one here")
            return Row(typed, UNSUPPORTED, argument.note)
        keys = [key for key, names in self.sources.items() if name in names]
        note = self.notes.get(name, "")
        if not keys:
            reason = note or argument.note or "without effect beside the other arguments"
            return Row(typed, NO_EFFECT, reason)
        text = " ".join(f"{key}={_format_value(self.get(key))}" for key in keys)
        return Row(typed, TRANSLATED, f"{text}; {note}" if note else text)


def _split_factor(word: str) -> tuple[str, str] | None:
    """Return the sign and the factor of a word such as `*60`, None of another word."""
    return (word[0], word[1:]) if word[0] in "*/" and "->" not in word else None


def read_constant(text: str) -> Any:
    """Return a value of the table as YAML reads it."""
    return yaml.safe_load(text)


def _find_default(section: str, name: str) -> Any:
    """Return the default of a key here, MISSING if it has none."""
    cls: Any = RunConfig
    if section:
        cls = {key.name: key.type for key in RunConfig.__dataclass_fields__.values()}[section]
    return cls.__dataclass_fields__[name].default if name in cls.__dataclass_fields__ else MISSING


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
