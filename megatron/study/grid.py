"""One grid of a study: all combinations of its lists. Each combination is a cell, which becomes a run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from megatron.config.option import REQUIRED, option
from megatron.config.schema import ModelConfig
from megatron.config.section import check_known_keys, read_section, to_integer
from megatron.plan.conventions import training_flops_per_token
from megatron.plan.count import n_params
from megatron.study.rules import read_rule
from megatron.study.seeds import Seeds, read_seeds

LENGTHS = ("train_tokens", "train_flops", "tokens_per_param")
CONVENTIONS = ("exact", "6nd", "kaplan", "palm", "megatron", "chinchilla")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=,@-]*")  # part of a folder's name
MAX_NAME_LENGTH = 200  # file systems allow 255 bytes for a folder's name


def check_name(name: str, where: str) -> None:
    """Raise ValueError for a name that is unsafe in folder names, lists of folders and shell scripts."""
    # The pattern excludes "/", spaces, quotes and a leading dash or dot: no path components, no shell words,
    # no options, no hidden folders.
    if not NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise ValueError(
            f"{where}: got the name {name!r}, expected letters, digits and . _ + = , @ -, at most "
            f"{MAX_NAME_LENGTH}. Choose another."
        )


def _read_label(value: Any, name: str) -> str:
    """Read a label; YAML reads 2 as a number."""
    label = str(to_integer(value))
    if label:
        check_name(label, name)
    return label


def read_sizes(value: Any, name: str) -> list[str]:
    """Read a list of names of sizes; YAML reads a size named 48 as a number."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: got {value!r}, expected a list.")
    sizes = [str(to_integer(size)) for size in value]
    for size in sizes:
        check_name(size, name)
    return sizes


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Lists whose combinations are the runs. An empty list is an axis that the grid does not have.

    train_tokens, train_flops, tokens_per_param   length, exactly one of them; FLOPs by `flops_convention`
    unique_tokens, epochs   one of them with a length, or both without; `epochs` alone: of the whole corpus
    seeds                   for all cells, or more seeds for some cells (study/seeds.py)
    lr, batch_tokens        rules (study/rules.py); default: the study's optim.lr and batch_size
    held_out                runs are used for prediction, not for fitting
    label                   suffix of the runs' names
    part                    name of the part of the study, for `sweep.py --part`
    run                     keys that override the study's `run`
    """

    objectives: list[str] = option(["autoregressive"], "objectives")
    sizes: list[str] = option(REQUIRED, "sizes", read=read_sizes)
    seeds: Seeds = field(default_factory=Seeds)  # read_grid: its cells are those of the other keys
    train_tokens: list[int] = option([], "length", above=0, unit="tokens")
    train_flops: list[float] = option([], "length", above=0, unit="FLOPs")
    tokens_per_param: list[float] = option([], "length", above=0, unit="tokens per parameter")
    unique_tokens: list[int] = option([], "tokens that are repeated", above=0, unit="tokens")
    epochs: list[float] = option([], "repetitions", above=0, unit="epochs")
    lr: list[Any] = option([], "rules")
    batch_tokens: list[Any] = option([], "rules", unit="tokens")
    flops_convention: str = option("exact", "convention of train_flops", *CONVENTIONS)
    held_out: bool = option(False, "runs are not used for fitting")
    label: str = option("", "suffix of the runs' names", read=_read_label)
    part: str = option("", "part of the study that the runs belong to", read=_read_label)
    run: dict[str, Any] = option({}, "keys that override the study's `run`", expected="sections with keys")

    def check(self, where: str) -> None:
        """Validate keys that depend on each other. Raises ValueError for a conflict."""
        given = [key for key in LENGTHS if getattr(self, key)]
        data = [key for key in ("unique_tokens", "epochs") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"{where}: got the lengths {given[0]} and {given[1]}, expected one of them.")
        # D = U x epochs: with two of the three the third follows
        if given and len(data) == 2:
            raise ValueError(
                f"{where}: got {given[0]}, unique_tokens and epochs, expected two of them: two determine the "
                "third."
            )
        if not given and "epochs" not in data:
            raise ValueError(
                f"{where}.train_tokens: got None, expected a list of train_tokens, train_flops, "
                "tokens_per_param or epochs."
            )
        for key in ("lr", "batch_tokens"):
            for i, rule in enumerate(getattr(self, key)):
                read_rule(rule, key, f"{where}.{key}[{i}]")

    def cells(self) -> Iterator["Cell"]:
        """Yield every combination of the axes, with each of its seeds."""
        # at most one of the lengths is set (check), so this axis has values of a single key
        axes: list[list[Any]] = [[(key, value) for key in LENGTHS for value in getattr(self, key)]]
        axes += [getattr(self, key) for key in ("unique_tokens", "epochs", "lr", "batch_tokens")]
        # an empty axis contributes None, so that the product is not empty
        # Example: 2 sizes, default seeds [0], seeds [0, 1, 2] for one of them: 2 x 3 combinations, of which
        # the second size has two fewer, so 4 cells.
        axes = [self.objectives, self.sizes, self.seeds.union(), *(axis or [None] for axis in axes)]
        for objective, size, seed, length, unique, epochs, lr, batch in product(*axes):
            cell = Cell(objective, size, seed, length, unique, epochs, lr, batch)
            # seeds can differ between cells: the product runs over all of them and skips those of other
            # cells
            if seed in self.seeds.select(cell.axis_values()):
                yield cell


@dataclass(frozen=True)
class Cell:
    """One combination. None means that the grid does not have the axis. `length` is (kind, value)."""

    objective: str
    size: str
    seed: int
    length: tuple[str, float] | None
    unique_tokens: int | None
    epochs: float | None
    lr: Any
    batch_tokens: Any

    def axis_values(self) -> dict[str, Any]:
        """Return the cell's value on each axis of the grid except the seed."""
        values = {
            key: getattr(self, key) for key in ("size", "unique_tokens", "epochs", "lr", "batch_tokens")
        }
        # `length` is stored under its kind, so that an entry of `seeds.cells` can select train_flops: 1.0e+11
        return {"objective": self.objective, **values} | dict([self.length] if self.length else [])

    def train_tokens(self, model: ModelConfig, seq_len: int, convention: str, all_tokens: int) -> float:
        """Return D of the run before rounding to whole steps. `all_tokens` is the size of the corpus."""
        if self.length is None:
            assert self.epochs is not None, "read_grid rejects other combinations"
            return (self.unique_tokens or all_tokens) * self.epochs
        kind, value = self.length
        if kind == "tokens_per_param":
            return value * n_params(model)
        # FLOPs per token do not depend on D, so D follows by one division
        if kind == "train_flops":
            return value / training_flops_per_token(model, seq_len)[convention]
        return value


def read_grid(raw: Any, where: str) -> Grid:
    """Read and validate a grid. Raises ValueError naming the key and the expected value."""
    check_known_keys(raw, [f.name for f in fields(Grid)], where)
    grid = read_section(Grid, {key: value for key, value in raw.items() if key != "seeds"}, where)
    grid.check(where)
    # after the other keys, since entries of `cells` are checked against their values
    return replace(grid, seeds=read_seeds(raw.get("seeds"), vars(grid), f"{where}.seeds"))
