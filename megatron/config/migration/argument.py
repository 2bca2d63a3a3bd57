"""Declaration of an argument of Megatron: its form, its default there, and what becomes of it here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRANSLATED = "translated"
IMPLIED = "implied"  # not given: the default of Megatron, which is another one here
NO_EFFECT = "no effect here"
UNSUPPORTED = "not supported"
OUTCOMES = (TRANSLATED, IMPLIED, NO_EFFECT, UNSUPPORTED)

SWITCH, INT, FLOAT, TEXT, BOOL, LIST = "switch", "int", "float", "text", "bool", "list"


@dataclass(frozen=True)
class Argument:
    """One argument, by its name without dashes at the start.

    kind      SWITCH: no value; LIST: any number of values; else one value of this type
    keys      keys of the configuration that it sets, alone or with others
    default   value that Megatron uses if it is not given; None: none, or derived from other arguments
    note      translated: how the value is converted; no effect: why; not supported: what to do
    harmless  values with which an unsupported argument changes nothing
    """

    name: str
    outcome: str
    kind: str
    keys: tuple[str, ...] = ()
    default: Any = None
    note: str = ""
    harmless: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """The argument as typed."""
        return f"--{self.name}"

    def convert(self, words: list[str]) -> Any:
        """Return the value of the words after the argument. Raises ValueError for a wrong form."""
        if self.kind == LIST:
            return words
        expected = 0 if self.kind == SWITCH else 1
        if len(words) != expected:
            got = f"{len(words)} values ({' '.join(words[:3])})" if words else "no value"
            raise ValueError(f"{self.option}: got {got}, expected {expected or 'none'}")
        if self.kind == SWITCH:
            return True
        (word,) = words
        if self.kind == BOOL:
            # argparse's type=bool: every text except the empty one is true, also "False"
            return bool(word)
        readers: Mapping[str, Any] = {INT: int, FLOAT: float, TEXT: str}
        try:
            return readers[self.kind](word)
        except ValueError:
            form = "a whole number" if self.kind == INT else "a number"
            raise ValueError(f"{self.option}: got {word!r}, expected {form}") from None


def translated(name: str, kind: str, keys: str, default: Any = None, note: str = "") -> Argument:
    """Declare an argument that sets the keys, which are separated by spaces."""
    return Argument(name, TRANSLATED, kind, tuple(keys.split()), default, note)


def unsupported(name: str, kind: str, note: str, *harmless: str) -> Argument:
    """Declare an argument that cannot be met, except with one of the harmless values."""
    return Argument(name, UNSUPPORTED, kind, note=note, harmless=harmless)
