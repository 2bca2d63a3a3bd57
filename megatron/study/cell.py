"""Cells of a STUDY.yaml: each entry lists values, and each combination of them is one run.

    - {size: [s24, s48], flops: [1.0e+11, 3.0e+11]}              # an isoFLOP grid of two sizes
    - {size: s48, flops: 1.0e+11, seeds: [1, 2]}                 # two more seeds of one of its cells
    - {size: s48, unique_tokens: 65_536, epochs: [4, 16], label: wd3, run: {optim: {weight_decay: 3.0}}}
    - {size: best, flops: 1.2e+12}                               # the run that the law forecasts

A run that two entries contain is trained once. `lr`, here or as `run.optim.lr`,
is a number or a rule: `steplaw` (Li et al., arXiv 2503.04715) or {coefficient:
1.79, n: -0.713, d: 0.307} for 1.79 N^-0.713 D^0.307.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron.config.option import REQUIRED, option
from megatron.config.schema import OBJECTIVES, ModelConfig
from megatron.config.section import check_known_keys, list_keys, read_section, to_integer
from megatron.config.yaml_file import is_finite
from megatron.plan.conventions import training_flops_per_token
from megatron.plan.count import n_non_embedding, n_params

BEST = "best"  # as a size: the one that the frontier chooses, once the forecast of its loss is sealed
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=,@-]*")  # part of a folder's name
MAX_NAME_LENGTH = 200  # file systems allow 255 bytes for a folder's name
MAX_SEEDS = 10_000  # a larger number of seeds is probably a mistake
SEEDS = f"a list of seeds, or a number of seeds from 1 to {MAX_SEEDS:,}."
EXPONENT = "a number from -10 to 10"
# N without embeddings, as defined by the authors
STEPLAW = {"coefficient": 1.79, "n": -0.713, "d": 0.307}
# Step Law and Kaplan count N without embeddings, Chinchilla with them: an
# exponent is only valid with its N.
COUNTS = {"non_embedding": n_non_embedding, "all": n_params}
REMOVED = {  # keys of earlier versions -> replacement
    "tokens_per_param": "tokens, listed by size",
    "batch_tokens": "run: {dataset: {batch_size: ...}}",
    "flops_convention": "flops_convention of the whole study",
}


def check_name(name: str, where: str) -> None:
    """Raise ValueError for a name that is unsafe in folder names, lists of folders and shell scripts."""
    # The pattern excludes "/", spaces, quotes and a leading dash or dot: no
    # path components, no shell words, no options, no hidden folders.
    if not NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise ValueError(
            f"{where}: got the name {name!r}, expected letters, digits and . _ + = , @ -, at most "
            f"{MAX_NAME_LENGTH}. Choose another."
        )


def check_removed_keys(raw: dict[str, Any], removed: dict[str, str], where: str) -> None:
    """Raise ValueError for a key of an earlier version, with its replacement."""
    for key in raw:
        if key in removed:
            raise ValueError(f"{where}.{key}: got a key of an earlier version. Use {removed[key]}.")


@dataclass(frozen=True, kw_only=True)
class ScalingRule:
    """Rule coefficient N^n D^d for a learning rate."""

    coefficient: float = option(REQUIRED, "factor", above=0, expected="a number above 0")
    n: float = option(0.0, "exponent of N", at_least=-10, at_most=10, expected=EXPONENT)
    d: float = option(0.0, "exponent of D", at_least=-10, at_most=10, expected=EXPONENT)
    params: str = option("non_embedding", "parameters that N counts", *COUNTS)

    def evaluate(self, model: ModelConfig, train_tokens: float) -> float:
        """Return the rate to six digits, since it is written to the config and enters the run's identity."""
        value = self.coefficient * COUNTS[self.params](model) ** self.n * train_tokens**self.d
        # Powers of float64 can differ in the last digit between two math
        # libraries. Six digits hide that: the same study has the same
        # identities on every machine.
        return float(f"{value:.6g}")


def read_rule(raw: Any, where: str) -> ScalingRule:
    """Read and validate a learning rate or a rule for it. Raises ValueError with the expected value."""
    if raw == "steplaw":
        raw = STEPLAW
    if is_finite(raw):
        raw = {"coefficient": raw}
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {raw!r}, expected a number, steplaw, or coefficient with n and d.")
    transfers = {name: f"run: {{model: {{parametrization: {name}, ...}}}}" for name in ("mup", "completep")}
    check_removed_keys(raw, transfers, where)
    return read_section(ScalingRule, raw, where)


def _read_label(value: Any, name: str) -> str:
    """Read a name; YAML reads 2 as a number."""
    label = str(to_integer(value))
    if label:
        check_name(label, name)
    return label


def _read_sizes(value: Any, name: str) -> list[str]:
    return [_read_label(size, name) for size in value]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of `cells`: lists whose combinations are runs. An empty list is not set."""

    objective: list[str] = option([OBJECTIVES[0]], "objectives")
    size: list[str] = option(REQUIRED, "sizes", read=_read_sizes)
    tokens: list[int] = option([], "length D", above=0, unit="tokens")
    flops: list[float] = option([], "length in FLOPs", above=0, unit="FLOPs")
    unique_tokens: list[int] = option([], "tokens that are repeated", above=0, unit="tokens")
    epochs: list[float] = option([], "repetitions", above=0, unit="epochs")
    lr: list[Any] = option([], "learning rates or rules")
    mixture: list[str] = option([], "mixtures of the study by name, or all")
    seeds: list[int] = option([0], "seeds", expected=SEEDS)
    held_out: bool = option(False, "runs are used for prediction, not for fitting")
    label: str = option("", "suffix of the runs' names", read=_read_label)
    part: str = option("", "part of the study that the runs belong to", read=_read_label)
    run: dict[str, Any] = option({}, "keys that override the study's `run`", expected="sections with keys")

    def check(self, where: str) -> None:
        """Validate keys that depend on each other. Raises ValueError for a conflict."""
        lengths = [key for key in ("tokens", "flops") if getattr(self, key)]
        data = [key for key in ("unique_tokens", "epochs") if getattr(self, key)]
        # D = U x epochs: with two of the three the third follows
        if len(lengths) > 1 or (lengths and len(data) == 2):
            given = ", ".join([*lengths, *data])
            raise ValueError(f"{where}: got {given}, expected two of D, unique_tokens and epochs at most.")
        if not lengths and "epochs" not in data:
            raise ValueError(f"{where}.tokens: got None, expected a list of tokens, flops or epochs.")
        if BEST in self.size and not (self.size == [BEST] and len(self.flops) == len(self.seeds) == 1):
            raise ValueError(f"{where}.size: got {BEST} with more values, expected one size, flops and seed.")
        for i, rule in enumerate(self.lr):
            read_rule(rule, f"{where}.lr[{i}]")

    def list_cells(self) -> Iterator["Cell"]:
        """Yield every combination."""
        # at most one of the lengths is set (check)
        lengths = [(key, value) for key in ("tokens", "flops") for value in getattr(self, key)]
        # an empty list contributes None, so that the product is not empty
        lists = (lengths, self.unique_tokens, self.epochs, self.lr, self.mixture)
        optional = (values or [None] for values in lists)
        for values in product(self.objective, self.size, dict.fromkeys(self.seeds or [0]), *optional):
            yield Cell(*values)


@dataclass(frozen=True)
class Cell:
    """One combination; None: not set. `length` is ("tokens", D) or ("flops", C)."""

    objective: str
    size: str
    seed: int
    length: tuple[str, float] | None
    unique_tokens: int | None
    epochs: float | None
    lr: Any
    mixture: str | None

    def train_tokens(self, model: ModelConfig, seq_len: int, convention: str, all_tokens: int) -> float:
        """Return D of the run before rounding to whole steps. `all_tokens` is the size of the corpus."""
        if self.length is None:
            assert self.epochs is not None, "Entry.check rejects other combinations"
            return (self.unique_tokens or all_tokens) * self.epochs
        kind, value = self.length
        # FLOPs per token do not depend on D, so D follows by one division
        return value if kind == "tokens" else value / training_flops_per_token(model, seq_len)[convention]


def read_entry(raw: Any, where: str) -> Entry:
    """Read and validate an entry. Raises ValueError naming the key and the expected value."""
    keys = list_keys(Entry)
    if isinstance(raw, dict):
        check_removed_keys(raw, REMOVED, where)
    check_known_keys(raw, keys, where)
    single = ("seeds", "held_out", "label", "part", "run")
    # a number n of seeds stands for 0, 1,
    # ..., n - 1; type(), since True is an int
    n_seeds = raw.get("seeds")
    if type(n_seeds) is int and 0 < n_seeds <= MAX_SEEDS:
        raw = raw | {"seeds": list(range(n_seeds))}
    singles = {key: raw[key] for key in raw if key not in single and not isinstance(raw[key], list | None)}
    entry = read_section(Entry, raw | {key: [value] for key, value in singles.items()}, where)
    entry.check(where)
    return entry
