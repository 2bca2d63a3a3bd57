"""Key `blind` of a STUDY.yaml: the run that is predicted before it is trained."""

from dataclasses import dataclass, field, fields
from typing import Any

from megatron.config.read import check_known_keys
from megatron.config.yaml_file import is_finite
from megatron.study.grid import Grid, read_grid
from megatron.study.seeds import Seeds

OBJECTIVES = ("autoregressive", "masked_diffusion")
MIN_COMPUTE, MAX_COMPUTE = 2.0, 8.0  # below: no extrapolation; above: intervals too wide to test the frontier
FLOPS_COLUMN = {"exact": "train_flops", "6nd": "flops_6nd"}  # convention -> column of the study's table
LABEL = "blind"  # suffix of the run's name
KEYS = ("objective", "compute", "sizes", "lr", "batch_tokens", "run", "flops_convention", "seed")


@dataclass(frozen=True)
class BlindPlan:
    """Settings of the run that tests the frontier.

    sizes        candidate sizes; the one nearest to the law's N* is trained
    compute      FLOPs of the run over the largest budget of the study's grids, MIN_COMPUTE to MAX_COMPUTE
    lr, batch_tokens   none or one rule each, as in a grid
    flops_convention   convention of all budgets of the frontier: a key of FLOPS_COLUMN
    run          keys that override the study's `run`
    """

    sizes: list[str]
    objective: str = "autoregressive"
    compute: float = 4.0
    lr: list[Any] = field(default_factory=list)
    batch_tokens: list[Any] = field(default_factory=list)
    flops_convention: str = "exact"
    seed: int = 0
    run: dict[str, Any] = field(default_factory=dict)

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
    check_known_keys(raw, KEYS, where)
    values = {key: value for key, value in raw.items() if value is not None}
    compute = values.get("compute", BlindPlan.compute)
    if not is_finite(compute) or not MIN_COMPUTE <= compute <= MAX_COMPUTE:
        raise ValueError(
            f"{where}.compute: got {compute!r}, expected {MIN_COMPUTE:g} to {MAX_COMPUTE:g} times the "
            "largest budget of the grids."
        )
    for key, allowed in (("objective", OBJECTIVES), ("flops_convention", tuple(FLOPS_COLUMN))):
        if values.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{where}.{key}: got {values[key]!r}, expected {' or '.join(allowed)}.")
    for key in ("lr", "batch_tokens"):
        if isinstance(values.get(key), list) and len(values[key]) > 1:
            raise ValueError(
                f"{where}.{key}: got {len(values[key])} rules, expected one. The blind run is a single run."
            )
    objective = values.get("objective", BlindPlan.objective)
    shared = {key: values[key] for key in ("sizes", "lr", "batch_tokens", "run") if key in values}
    seed = values.get("seed", 0)
    # read_grid validates the shared keys; the length is a placeholder, since the budget depends on the
    # grids
    grid = read_grid(
        {"objectives": [objective], "seeds": [seed], "train_flops": [1.0], "label": LABEL, **shared}, where
    )
    return BlindPlan(
        # the grid's values, not the raw ones: sizes are text and rules are validated
        **{f.name: getattr(grid, f.name) for f in fields(BlindPlan) if f.name in shared},
        objective=objective,
        compute=float(compute),
        flops_convention=values.get("flops_convention", "exact"),
        seed=grid.seeds.default[0],
    )
