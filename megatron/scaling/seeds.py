"""The seeds of a grid: the same for all of its cells, or more for some of them.

    seeds: 3                        # 0, 1 and 2, in every cell
    seeds: [0, 7]                   # these, in every cell
    seeds:                          # [0] in every cell, and three in those of one size at one budget
      default: [0]
      cells:
        - {size: s48, train_flops: 1.0e+11, seeds: 3}

An entry of `cells` names cells by the values of one or more keys; the keys that it does not name are free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.read import refuse_unknown
from megatron.config.yaml_file import is_finite

# key of an entry: key of the grid that lists its values
AXES = {
    "objective": "objectives", "size": "sizes", "train_tokens": "train_tokens", "train_flops": "train_flops",
    "tokens_per_param": "tokens_per_param", "unique_tokens": "unique_tokens", "epochs": "epochs", "lr": "lr",
    "batch_tokens": "batch_tokens",
}  # fmt: skip
MOST = 10_000  # of a number of seeds; more are a number of something else


@dataclass(frozen=True)
class Seeds:
    """Seeds of the cells of a grid.

    default  of every cell that no entry names
    cells    entries: values of keys of AXES, and `seeds`, a list
    """

    default: list[int]
    cells: list[dict[str, Any]] = field(default_factory=list)

    def of(self, axes: Mapping[str, Any]) -> list[int]:
        """The seeds of the cell with these values (Cell.axes)."""
        for entry in self.cells:
            if all(axes.get(key) == value for key, value in entry.items() if key != "seeds"):
                return entry["seeds"]
        return self.default

    def all(self) -> list[int]:
        """Every seed of any cell, the default first."""
        return list(
            dict.fromkeys([*self.default, *(seed for entry in self.cells for seed in entry["seeds"])])
        )


def read_seeds(raw: Any, grid: Mapping[str, Sequence[Any]], where: str) -> Seeds:
    """`seeds` of a grid as written; `grid` has the lists of its other keys. None: seed 0 alone.

    Raises ValueError for what is no seed, for a cell that the grid does not have, and for two entries that
    name one cell.
    """
    if not isinstance(raw, dict):
        return Seeds(_read_list([0] if raw is None else raw, where))
    refuse_unknown(raw, ["default", "cells"], where)
    default = _read_list([0] if raw.get("default") is None else raw["default"], f"{where}.default")
    entries = raw.get("cells") or []
    if not isinstance(entries, list):
        raise ValueError(f"{where}.cells: got {entries!r}, expected a list of cells with their seeds.")
    read: list[dict[str, Any]] = []
    for i, entry in enumerate(entries):
        read.append(_read_entry(entry, grid, f"{where}.cells[{i}]"))
        for j, other in enumerate(read[:-1]):
            if _overlap(other, read[-1]):
                raise ValueError(
                    f"{where}.cells[{i}]: names a cell that cells[{j}] names too. Give each cell one entry."
                )
    return Seeds(default, read)


def _read_entry(entry: Any, grid: Mapping[str, Sequence[Any]], where: str) -> dict[str, Any]:
    """One entry of `cells`, each of its values one that the grid lists."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: got {entry!r}, expected keys such as size, train_flops and seeds.")
    refuse_unknown(entry, [*AXES, "seeds"], where)
    if entry.get("seeds") is None:
        raise ValueError(f"{where}.seeds: missing, expected a number of seeds or a list of them.")
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "seeds" or value is None:
            continue
        listed = grid.get(AXES[key]) or []
        found[key] = str(value) if key == "size" else plain(value)
        if found[key] not in listed:
            known = (
                f"one of its {AXES[key]}, {', '.join(map(str, listed))}" if listed else "a key that it has"
            )
            raise ValueError(
                f"{where}.{key}: got {value!r}, a cell that the grid does not have; expected {known}."
            )
    if not found:
        raise ValueError(f"{where}: names no cell, expected one or more of {', '.join(AXES)}.")
    return found | {"seeds": _read_list(entry["seeds"], f"{where}.seeds")}


def _read_list(value: Any, where: str) -> list[int]:
    """A list of seeds; a number of them stands for 0, 1, ..."""
    value = plain(value)
    if type(value) is int and 0 < value <= MOST:
        return list(range(value))
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where}: got {value!r}, expected a list of seeds, or a number of them from 1 to {MOST:,}."
        )
    seeds = [plain(seed) for seed in value]
    for seed in seeds:
        if not is_finite(seed) or not isinstance(seed, int):
            raise ValueError(f"{where}: got {seed!r}, expected whole numbers.")
    return list(dict.fromkeys(seeds))


def _overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether one cell fits both entries: no key has two values."""
    return all(a[key] == b[key] for key in a.keys() & b.keys() if key != "seeds")


def plain(value: Any) -> Any:
    """YAML reads 1e6 as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value
