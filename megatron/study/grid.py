"""One grid of a study: all combinations of its lists. Each combination is a cell, which becomes a run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from megatron.config.read import check_known_keys
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import is_finite
from megatron.plan.conventions import training_flops_per_token
from megatron.plan.count import n_params
from megatron.study.rules import read_rule
from megatron.study.seeds import Seeds, read_seeds, to_integer

LENGTHS = ("train_tokens", "train_flops", "tokens_per_param")
CONVENTIONS = ("exact", "6nd", "kaplan", "palm", "megatron", "chinchilla")
DEFAULTS: dict[str, Any] = {"objectives": ["autoregressive"]}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=,@-]*")  # part of a folder's name
MAX_NAME_LENGTH = 200  # file systems allow 255 bytes for a folder's name
WHOLE = ("train_tokens", "unique_tokens")


@dataclass(frozen=True)
class Grid:
    """Lists whose combinations are the runs. An empty list is an axis that the grid does not have.

    train_tokens, train_flops, tokens_per_param   length, exactly one of them; FLOPs by `flops_convention`
    unique_tokens, epochs   one of them with a length, or both without; `epochs` alone: of the whole corpus
    seeds                   for all cells, or more seeds for some cells (study/seeds.py)
    lr, batch_tokens        rules (study/rules.py); default: the study's optim.lr and batch_size
    held_out                runs are used for prediction, not for fitting
    label                   suffix of the runs' names
    run                     keys that override the study's `run`
    """

    objectives: list[str]
    sizes: list[str]
    seeds: Seeds
    train_tokens: list[int] = field(default_factory=list)
    train_flops: list[float] = field(default_factory=list)
    tokens_per_param: list[float] = field(default_factory=list)
    unique_tokens: list[int] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    lr: list[Any] = field(default_factory=list)
    batch_tokens: list[Any] = field(default_factory=list)
    flops_convention: str = "exact"
    held_out: bool = False
    label: str = ""
    run: dict[str, Any] = field(default_factory=dict)

    def cells(self) -> Iterator["Cell"]:
        """Yield every combination of the axes, with each of its seeds."""
        # at most one of the lengths is set (_check_combinations), so this axis has values of a single key
        axes: list[list[Any]] = [[(key, value) for key in LENGTHS for value in getattr(self, key)]]
        axes += [getattr(self, key) for key in ("unique_tokens", "epochs", "lr", "batch_tokens")]
        # an empty axis contributes None, so that the product is not empty
        # Example: 2 sizes, default seeds [0], seeds [0, 1, 2] for one of them: 2 x 3 combinations, of which
        # the second size has two fewer, so 4 cells.
        lists = (self.objectives, self.sizes, self.seeds.union(), *(axis or [None] for axis in axes))
        for objective, size, seed, length, unique, epochs, lr, batch in product(*lists):
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
    values = DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    for f in fields(Grid):
        # dataclasses store annotations as text under `from __future__`, else as types: both are accepted
        if f.type in ("str", str) or f.name in ("held_out", "run", "seeds"):
            continue
        value = values.get(f.name, [])
        if not isinstance(value, list) or not value and f.name in ("objectives", "sizes"):
            raise ValueError(f"{where}.{f.name}: got {raw.get(f.name)!r}, expected a list.")
        values[f.name] = [to_integer(item) for item in value]
    values["sizes"] = [str(size) for size in values["sizes"]]
    values["label"] = str(values.get("label", ""))
    for name in (*values["sizes"], *filter(None, [values["label"]])):
        check_name(name, f"{where}: sizes and label")
    for key in (*LENGTHS, "unique_tokens", "epochs"):
        # is_finite rejects bool, NaN and text; the comparison with 0 is only valid for the rest
        wrong = [n for n in values[key] if not is_finite(n)]
        # `in` compares by identity first, so a NaN in `wrong` is recognised although NaN != NaN
        wrong += [n for n in values[key] if n not in wrong and n <= 0]
        if wrong:
            raise ValueError(f"{where}.{key}: got {wrong[0]!r}, expected numbers above 0.")
        whole = [n for n in values[key] if key in WHOLE and not isinstance(n, int)]
        if whole:
            raise ValueError(f"{where}.{key}: got {whole[0]!r}, expected integers.")
    run, held_out = values.get("run", {}), values.get("held_out", False)
    if not isinstance(run, dict):
        raise ValueError(f"{where}.run: got {run!r}, expected sections with keys.")
    if not isinstance(held_out, bool):
        raise ValueError(f"{where}.held_out: got {held_out!r}, expected true or false.")
    _check_combinations(values, where)
    # after the axes, since entries of `cells` are checked against their values
    values["seeds"] = read_seeds(values.get("seeds"), values, f"{where}.seeds")
    return Grid(**values)


def check_name(name: str, where: str) -> None:
    """Raise ValueError for a name that is unsafe in folder names, lists of folders and shell scripts."""
    # The pattern excludes "/", spaces, quotes and a leading dash or dot: no path components, no shell words,
    # no options, no hidden folders.
    if not NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise ValueError(
            f"{where}: got the name {name!r}, expected letters, digits and . _ + = , @ -, at most "
            f"{MAX_NAME_LENGTH}. Choose another."
        )


def _check_combinations(values: dict[str, Any], where: str) -> None:
    """Validate keys that depend on each other. Raises ValueError for a conflict."""
    given = [key for key in LENGTHS if values[key]]
    data = [key for key in ("unique_tokens", "epochs") if values[key]]
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
            f"{where}.train_tokens: got None, expected a list of train_tokens, train_flops, tokens_per_param "
            "or epochs."
        )
    convention = values.get("flops_convention", "exact")
    if convention not in CONVENTIONS:
        raise ValueError(
            f"{where}.flops_convention: got {convention!r}, expected one of {', '.join(CONVENTIONS)}."
        )
    for key in ("lr", "batch_tokens"):
        for i, rule in enumerate(values[key]):
            read_rule(rule, key, f"{where}.{key}[{i}]")
