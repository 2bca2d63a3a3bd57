"""Seeds of a grid: the same for all cells, or more seeds for some cells.

    seeds: 3                        # 0, 1 and 2, in every cell
    seeds: [0, 7]                   # these seeds, in every cell
    seeds:                          # [0] in every cell, and three in those of one size at one budget
      default: [0]
      cells:
        - {size: s48, train_flops: 1.0e+11, seeds: 3}

An entry of `cells` selects cells by the values of one or more keys; omitted keys match every value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.option import option
from megatron.config.section import check_known_keys, read_section, to_integer
from megatron.config.yaml_file import is_finite

# key of an entry -> key of the grid that lists its values
AXES = {
    "objective": "objectives", "size": "sizes", "train_tokens": "train_tokens", "train_flops": "train_flops",
    "tokens_per_param": "tokens_per_param", "unique_tokens": "unique_tokens", "epochs": "epochs", "lr": "lr",
    "batch_tokens": "batch_tokens",
}  # fmt: skip
MAX_SEEDS = 10_000  # largest number of seeds; a larger one is probably a mistake


def _read_list(value: Any, where: str) -> list[int]:
    """Read a list of seeds; a number n stands for 0, 1, ..., n - 1."""
    value = to_integer(value)
    # type() instead of isinstance: True is an int
    if type(value) is int and 0 < value <= MAX_SEEDS:
        return list(range(value))
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where}: got {value!r}, expected a list of seeds, or a number of seeds from 1 to {MAX_SEEDS:,}."
        )
    seeds = [to_integer(seed) for seed in value]
    for seed in seeds:
        if not is_finite(seed) or not isinstance(seed, int):
            raise ValueError(f"{where}: got {seed!r}, expected integers.")
    # duplicates would train one run twice under one identity
    return list(dict.fromkeys(seeds))


@dataclass(frozen=True)
class Seeds:
    """Seeds of the cells of a grid.

    default  seeds of every cell that no entry selects
    cells    entries: values of keys of AXES, and `seeds`, a list
    """

    default: list[int] = option([0], "seeds of the other cells", read=_read_list)
    cells: list[Any] = option([], "cells with their seeds", expected="a list of cells with their seeds")

    def select(self, axes: Mapping[str, Any]) -> list[int]:
        """Return the seeds of the cell with these values (Cell.axis_values)."""
        # the first matching entry; entries cannot overlap (read_seeds)
        for entry in self.cells:
            # `axes` has None for an axis that the grid does not have, and a value of an entry is never None
            if all(axes.get(key) == value for key, value in entry.items() if key != "seeds"):
                return entry["seeds"]
        return self.default

    def union(self) -> list[int]:
        """Return the seeds of all cells without duplicates, the default ones first."""
        return list(
            dict.fromkeys([*self.default, *(seed for entry in self.cells for seed in entry["seeds"])])
        )


def read_seeds(raw: Any, grid: Mapping[str, Sequence[Any]], where: str) -> Seeds:
    """Read and validate `seeds` of a grid; `grid` has the lists of its other keys. None means [0].

    Raises ValueError for an invalid seed, for a cell that the grid does not have, and for two entries that
    select the same cell.
    """
    if not isinstance(raw, dict):
        return Seeds() if raw is None else Seeds(_read_list(raw, where))
    seeds = read_section(Seeds, raw, where)
    read: list[dict[str, Any]] = []
    for i, entry in enumerate(seeds.cells):
        read.append(_read_entry(entry, grid, f"{where}.cells[{i}]"))
        # Quadratic in the number of entries, of which a study has a few. Example of an overlap: {size: a} and
        # {train_flops: 1e18} both select the cell of size a at 1e18 FLOPs.
        for j, other in enumerate(read[:-1]):
            # entries overlap if no shared key differs, since omitted keys match every value
            if _do_overlap(other, read[-1]):
                raise ValueError(
                    f"{where}.cells[{i}]: got a cell of cells[{j}], expected one entry per cell."
                )
    return Seeds(seeds.default, read)


def _read_entry(entry: Any, grid: Mapping[str, Sequence[Any]], where: str) -> dict[str, Any]:
    """Read one entry of `cells`; each of its values must be in the grid."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: got {entry!r}, expected keys such as size, train_flops and seeds.")
    check_known_keys(entry, [*AXES, "seeds"], where)
    if entry.get("seeds") is None:
        raise ValueError(f"{where}.seeds: got None, expected a number of seeds or a list of seeds.")
    axes: dict[str, Any] = {}
    for key, value in entry.items():
        if key == "seeds" or value is None:
            continue
        listed = grid.get(AXES[key]) or []
        # A size named 48 is an integer in YAML; grids convert sizes to text as well.
        axes[key] = str(value) if key == "size" else to_integer(value)
        if axes[key] not in listed:
            choices = (
                f"one of its {AXES[key]}, {', '.join(map(str, listed))}" if listed else "a key of the grid"
            )
            raise ValueError(
                f"{where}.{key}: got {value!r}, a cell that the grid does not have; expected {choices}."
            )
    if not axes:
        raise ValueError(f"{where}: got no cell, expected one or more of {', '.join(AXES)}.")
    return axes | {"seeds": _read_list(entry["seeds"], f"{where}.seeds")}


def _do_overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether some cell matches both entries: no key has different values."""
    return all(a[key] == b[key] for key in a.keys() & b.keys() if key != "seeds")
