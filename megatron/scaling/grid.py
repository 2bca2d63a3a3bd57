"""One grid of a study: all combinations of what it lists, each a cell that becomes a run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from megatron.config.count import n_params
from megatron.config.read import refuse_unknown
from megatron.config.schema import ModelConfig
from megatron.config.yaml_file import is_finite
from megatron.scaling.conventions import training_flops_per_token
from megatron.scaling.rules import read_rule
from megatron.scaling.seeds import Seeds, plain, read_seeds

LENGTHS = ("train_tokens", "train_flops", "tokens_per_param")
CONVENTIONS = ("exact", "6nd", "kaplan", "palm", "megatron", "chinchilla")
DEFAULTS: dict[str, Any] = {"objectives": ["autoregressive"]}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=,@-]*")  # a part of a folder's name
MOST_LETTERS = 200  # of a folder's name, which may have 255
WHOLE = ("train_tokens", "unique_tokens")


@dataclass(frozen=True)
class Grid:
    """All combinations of its lists; an empty list is an axis that the grid does not have.

    train_tokens, train_flops, tokens_per_param   length, one of them; FLOPs by `flops_convention`
    unique_tokens, epochs   one of them beside a length, or both instead of one; epochs alone are of all text
    seeds                   of all cells, or more for some of them (scaling/seeds.py)
    lr, batch_tokens        rules (scaling/rules.py); without them the study's optim.lr and batch_size
    held_out                for predicting, not for fitting
    label                   ends the names of its runs
    run                     laid over the study's
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
        """Every combination, with the seeds of each."""
        axes: list[list[Any]] = [[(key, value) for key in LENGTHS for value in getattr(self, key)]]
        axes += [getattr(self, key) for key in ("unique_tokens", "epochs", "lr", "batch_tokens")]
        lists = (self.objectives, self.sizes, self.seeds.all(), *(axis or [None] for axis in axes))
        for objective, size, seed, length, unique, epochs, lr, batch in product(*lists):
            cell = Cell(objective, size, seed, length, unique, epochs, lr, batch)
            if seed in self.seeds.of(cell.axes()):
                yield cell


@dataclass(frozen=True)
class Cell:
    """One combination; None is an axis that the grid does not have. `length` is (kind, value)."""

    objective: str
    size: str
    seed: int
    length: tuple[str, float] | None
    unique_tokens: int | None
    epochs: float | None
    lr: Any
    batch_tokens: Any

    def axes(self) -> dict[str, Any]:
        """Its value of each key of the grid that is a list, the seed aside."""
        told = {key: getattr(self, key) for key in ("size", "unique_tokens", "epochs", "lr", "batch_tokens")}
        return {"objective": self.objective, **told} | dict([self.length] if self.length else [])

    def train_tokens(self, model: ModelConfig, seq_len: int, convention: str, all_tokens: int) -> float:
        """D of the run, before it is rounded to whole steps; `all_tokens` are those of the corpus."""
        if self.length is None:
            assert self.epochs is not None, "read_grid refuses the others"
            return (self.unique_tokens or all_tokens) * self.epochs
        kind, value = self.length
        if kind == "tokens_per_param":
            return value * n_params(model)
        if kind == "train_flops":
            return value / training_flops_per_token(model, seq_len)[convention]
        return value


def read_grid(raw: Any, where: str) -> Grid:
    """A grid as written. ValueError names the key and what was wanted."""
    refuse_unknown(raw, [f.name for f in fields(Grid)], where)
    values = DEFAULTS | {key: value for key, value in raw.items() if value is not None}
    for f in fields(Grid):
        if f.type in ("str", str) or f.name in ("held_out", "run", "seeds"):
            continue
        value = values.get(f.name, [])
        if not isinstance(value, list) or not value and f.name in ("objectives", "sizes"):
            raise ValueError(f"{where}.{f.name}: found {raw.get(f.name)!r}, wanted a list")
        values[f.name] = [plain(one) for one in value]
    values["sizes"] = [str(size) for size in values["sizes"]]
    values["label"] = str(values.get("label", ""))
    for name in (*values["sizes"], *filter(None, [values["label"]])):
        check_name(name, f"{where}: sizes and label")
    for key in (*LENGTHS, "unique_tokens", "epochs"):
        wrong = [n for n in values[key] if not is_finite(n)]
        wrong += [n for n in values[key] if n not in wrong and n <= 0]
        if wrong:
            raise ValueError(f"{where}.{key}: found {wrong[0]!r}, wanted numbers above 0")
        whole = [n for n in values[key] if key in WHOLE and not isinstance(n, int)]
        if whole:
            raise ValueError(f"{where}.{key}: found {whole[0]!r}, wanted whole numbers")
    run, held_out = values.get("run", {}), values.get("held_out", False)
    if not isinstance(run, dict):
        raise ValueError(f"{where}.run: found {run!r}, wanted sections with keys")
    if not isinstance(held_out, bool):
        raise ValueError(f"{where}.held_out: found {held_out!r}, wanted true or false")
    _check(values, where)
    values["seeds"] = read_seeds(values.get("seeds"), values, f"{where}.seeds")
    return Grid(**values)


def check_name(name: str, where: str) -> None:
    """ValueError for a name that cannot be part of a folder's: lists of folders and shell scripts have it."""
    if not NAME.fullmatch(name) or len(name) > MOST_LETTERS:
        raise ValueError(
            f"{where}: got the name {name!r}, expected letters, digits and . _ + = , @ -, at most "
            f"{MOST_LETTERS}. Choose another."
        )


def _check(values: dict[str, Any], where: str) -> None:
    """What one key says about another."""
    given = [key for key in LENGTHS if values[key]]
    data = [key for key in ("unique_tokens", "epochs") if values[key]]
    if len(given) > 1:
        raise ValueError(f"{where}: {given[0]} and {given[1]} are both a length; give one")
    if given and len(data) == 2:
        raise ValueError(f"{where}: {given[0]}, unique_tokens and epochs: any two say the third; give two")
    if not given and "epochs" not in data:
        raise ValueError(
            f"{where}.train_tokens: found None, wanted a list of it, or of train_flops, tokens_per_param "
            "or epochs"
        )
    convention = values.get("flops_convention", "exact")
    if convention not in CONVENTIONS:
        raise ValueError(
            f"{where}.flops_convention: found {convention!r}, wanted one of {', '.join(CONVENTIONS)}"
        )
    for key in ("lr", "batch_tokens"):
        for i, told in enumerate(values[key]):
            read_rule(told, key, f"{where}.{key}[{i}]")
