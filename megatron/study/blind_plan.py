"""Key `blind` of a STUDY.yaml: the run that is predicted before it is trained."""

from dataclasses import dataclass
from typing import Any

from megatron.config.option import REQUIRED, option
from megatron.config.schema import OBJECTIVES
from megatron.config.section import read_section
from megatron.study.grid import Grid, read_sizes
from megatron.study.seeds import Seeds

MIN_COMPUTE, MAX_COMPUTE = 2.0, 8.0  # below: no extrapolation; above: intervals too wide to test the frontier
FLOPS_COLUMN = {"exact": "train_flops", "6nd": "flops_6nd"}  # convention -> column of the study's table
LABEL = "blind"  # suffix of the run's name


@dataclass(frozen=True, kw_only=True)
class BlindPlan:
    """Settings of the run that tests the frontier.

    sizes        candidate sizes; the one nearest to the law's N* is trained
    compute      FLOPs of the run over the largest budget of the study's grids, MIN_COMPUTE to MAX_COMPUTE
    lr, batch_tokens   none or one rule each, as in a grid
    flops_convention   convention of all budgets of the frontier: a key of FLOPS_COLUMN
    run          keys that override the study's `run`
    """

    sizes: list[str] = option(REQUIRED, "candidate sizes", read=read_sizes)
    objective: str = option(OBJECTIVES[0], "objective", *OBJECTIVES, expected=" or ".join(OBJECTIVES))
    compute: float = option(
        4.0, "FLOPs over the largest budget", at_least=MIN_COMPUTE, at_most=MAX_COMPUTE,
        expected=f"{MIN_COMPUTE:g} to {MAX_COMPUTE:g} times the largest budget of the grids.",
    )  # fmt: skip
    lr: list[Any] = option([], "rule of the learning rate")
    batch_tokens: list[Any] = option([], "rule of the batch", unit="tokens")
    flops_convention: str = option(
        "exact", "convention of all budgets", *FLOPS_COLUMN, expected=" or ".join(FLOPS_COLUMN)
    )
    seed: int = option(0, "seed", unit="-")
    run: dict[str, Any] = option({}, "keys that override the study's `run`", expected="sections with keys")

    @property
    def flops_column(self) -> str:
        """Column of the table that holds C."""
        return FLOPS_COLUMN[self.flops_convention]

    def make_grid(self, size: str, flops: float) -> Grid:
        """Return a grid with one run: `size` trained with `flops` FLOPs."""
        return Grid(
            objectives=[self.objective],
            sizes=[size],
            seeds=Seeds([self.seed]),
            train_flops=[flops],
            lr=self.lr,
            batch_tokens=self.batch_tokens,
            flops_convention=self.flops_convention,
            held_out=True,
            label=LABEL,
            run=self.run,
        )


def read_blind_plan(raw: Any, where: str) -> BlindPlan:
    """Read and validate the key `blind`. Raises ValueError naming the key and the expected value."""
    plan = read_section(BlindPlan, raw, where)
    for key in ("lr", "batch_tokens"):
        n = len(getattr(plan, key))
        if n > 1:
            raise ValueError(f"{where}.{key}: got {n} rules, expected one. The blind run is a single run.")
    # the length is a placeholder, since the budget depends on the grids
    for size in plan.sizes:
        plan.make_grid(size, flops=1.0).check(where)
    return plan
