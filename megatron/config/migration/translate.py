"""Translation of a Megatron command line to the sections of a configuration, with a row for each argument."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.config.migration.argument import IMPLIED, NO_EFFECT, TRANSLATED, UNSUPPORTED
from megatron.config.migration.command_line import ARGUMENTS, CommandLine, find_argument, suggest_argument
from megatron.config.schema import RunConfig

MISSING = object()


@dataclass(frozen=True)
class Row:
    """One line of the table: an argument, what becomes of it, and the settings or what to do."""

    argument: str
    outcome: str
    text: str


@dataclass(frozen=True)
class Translation:
    """A translated command.

    settings  sections of the configuration, as in YAML
    rows      a row for each argument, and for each default of Megatron that is another one here
    files     data-path files to write beside the configuration: name -> content; settings name them so
    commands  commands that make the datasets that the settings name, to be run before training
    """

    settings: dict[str, Any]
    rows: list[Row]
    files: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    @property
    def refused(self) -> list[Row]:
        """Rows of arguments that cannot be met."""
        return [row for row in self.rows if row.outcome == UNSUPPORTED]


@dataclass
class Draft:
    """A translation under construction: the rules read arguments from it and set keys in it.

    count_ids       number of entries of a vocabulary file, None if it is not there
    read_words      words of a text file (--data-args-path)
    read_deepspeed  content of a DeepSpeed JSON, None if it is not there
    unsplit         why zero3 replaces the split of the model over ranks; empty: the model is split
    """

    command: CommandLine
    objective: str
    n_ranks: int | None
    count_ids: Callable[[str], int | None]
    read_words: Callable[[str], list[str]]
    read_deepspeed: Callable[[str], dict[str, Any] | None]
    unsplit: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    implied: list[Row] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def has(self, *names: str) -> bool:
        """Return whether any of the arguments is given."""
        return any(name in self.command.given for name in names)

    def value(self, *names: str) -> Any:
        """Return the first of the arguments that is given, else Megatron's default of the first."""
        for name in names:
            if name in self.command.given:
                return self.command.given[name]
        return ARGUMENTS[names[0].replace("_", "-")].default

    def require(self, *names: str) -> Any:
        """Return the value of an argument that Megatron requires. Raises ValueError if it is missing."""
        if not self.has(*names):
            raise ValueError(f"--{names[0]}: missing. Megatron requires it, and so does the translation.")
        return self.value(*names)

    def set(self, key: str, value: Any, *names: str) -> None:
        """Set a key because of these arguments, given or not; a default of both sides is left out."""
        given = [name for name in names if self.has(name)]
        section, _, name = key.rpartition(".")
        default = _find_default(section, name)
        if not given:
            if value == default and type(value) is type(default):
                return
            self.implied.append(Row(_describe_default(names), IMPLIED, f"{key}={_format_value(value)}"))
        target = self.settings.setdefault(section, {}) if section else self.settings
        target[name] = value
        self.sources[key] = (*self.sources.get(key, ()), *given)

    def refuse(self, name: str, what_to_do: str) -> None:
        """Record that an argument cannot be met, or the default of one that is not given."""
        self.refusals[name] = what_to_do

    def explain(self, name: str, note: str) -> None:
        """Record why an argument that is given sets no key, or what is special about how it does."""
        self.notes[name] = note

    def confirm(self, name: str, note: str) -> None:
        """Record that an argument holds here without any key."""
        self.confirmed.add(name)
        self.notes[name] = note

    def imply(self, what: str, key: str, value: Any) -> None:
        """Set a key because of what Megatron always does."""
        section, _, name = key.rpartition(".")
        self.settings.setdefault(section, {})[name] = value
        self.implied.append(Row(f"({what})", IMPLIED, f"{key}={_format_value(value)}"))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key that was set."""
        section, _, name = key.rpartition(".")
        return self.settings.get(section, {}).get(name, default)

    def list_rows(self) -> list[Row]:
        """Return the rows: arguments in their order, then defaults of Megatron, then unknown arguments."""
        rows = [self._make_row(name, value) for name, value in self.command.given.items()]
        absent = [name for name in self.refusals if name not in self.command.given]
        rows += self.implied
        rows += [Row(f"({_option(name)} absent)", UNSUPPORTED, self.refusals[name]) for name in absent]
        for name, words in self.command.unknown.items():
            hint = suggest_argument(name) or "omit it"
            rows.append(Row(_as_typed(name, words), UNSUPPORTED, f"no argument of Megatron; {hint}"))
        return rows

    def _make_row(self, name: str, value: Any) -> Row:
        argument = find_argument(name)
        assert argument is not None, "parse_command has found it"
        typed = _as_typed(name, value)
        if name in self.refusals:
            return Row(typed, UNSUPPORTED, self.refusals[name])
        if name in self.confirmed:
            return Row(typed, TRANSLATED, self.notes[name])
        if argument.outcome == NO_EFFECT:
            return Row(typed, NO_EFFECT, argument.note)
        if argument.outcome == UNSUPPORTED:
            words = " ".join(value)
            if argument.harmless and words in argument.harmless:
                return Row(typed, NO_EFFECT, "this value is the only one here")
            return Row(typed, UNSUPPORTED, argument.note)
        keys = [key for key, names in self.sources.items() if name in names]
        note = self.notes.get(name, "")
        if not keys:
            return Row(typed, NO_EFFECT, note or "without effect beside the other arguments")
        text = " ".join(f"{key}={_format_value(self._read(key))}" for key in keys)
        return Row(typed, TRANSLATED, f"{text}; {note}" if note else text)

    def _read(self, key: str) -> Any:
        section, _, name = key.rpartition(".")
        return (self.settings[section] if section else self.settings)[name]


def _find_default(section: str, name: str) -> Any:
    """Return the default of a key here, MISSING if it has none."""
    cls: Any = RunConfig
    if section:
        cls = {key.name: key.type for key in RunConfig.__dataclass_fields__.values()}[section]
    return cls.__dataclass_fields__[name].default if name in cls.__dataclass_fields__ else MISSING


def _option(name: str) -> str:
    argument = find_argument(name)
    return argument.option if argument is not None else f"--{name}"


def _as_typed(name: str, value: Any) -> str:
    """Return an argument as it was typed, cut to a width of 60."""
    words = "" if value is True else " ".join(value) if isinstance(value, list) else _format_value(value)
    typed = f"{_option(name)} {words}".rstrip()
    return typed if len(typed) <= 60 else f"{typed[:57]}..."


def _describe_default(names: tuple[str, ...]) -> str:
    """Return the arguments that are not given, with Megatron's default of the first."""
    if not names:
        return "(default)"
    default = ARGUMENTS[names[0].replace("_", "-")].default
    value = "absent" if default is None else " ".join(default) if isinstance(default, list) else default
    return f"({_option(names[0])} {value})"


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
