"""The key `blind` of a STUDY.yaml: which run is predicted before it is trained."""

from dataclasses import dataclass, field, fields
from typing import Any

from megatron.config.read import refuse_unknown
from megatron.config.yaml_file import is_finite
from megatron.scaling.grid import Grid, read_grid
from megatron.scaling.seeds import Seeds

OBJECTIVES = ("autoregressive", "masked_diffusion")
LEAST_COMPUTE, MOST_COMPUTE = 2.0, 8.0  # nearer is no extrapolation; further the frontier predicts little
COLUMN = {"exact": "train_flops", "6nd": "flops_6nd"}  # of a study's table, by convention
LABEL = "blind"  # ends the name of the run
KNOWN = ("objective", "compute", "sizes", "lr", "batch_tokens", "run", "flops_convention", "seed")


@dataclass(frozen=True)
class BlindPlan:
    """The run that tests the frontier.

    sizes        candidates, of which the one nearest to the law's N* is trained
    compute      its FLOPs over the largest budget of the study's grids, LEAST_COMPUTE to MOST_COMPUTE
    lr, batch_tokens   none or one rule each, as in a grid
    flops_convention   of all budgets of the frontier: a key of COLUMN
    run          laid over the study's
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
        """The column of the table that holds C."""
        return COLUMN[self.flops_convention]

    def grid(self, size: str, flops: float) -> Grid:
        """The grid of one run: `size` trained with so many FLOPs."""
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
    """The key as written. ValueError names the key and what was expected."""
    refuse_unknown(raw, KNOWN, where)
    values = {key: value for key, value in raw.items() if value is not None}
    compute = values.get("compute", BlindPlan.compute)
    if not is_finite(compute) or not LEAST_COMPUTE <= compute <= MOST_COMPUTE:
        raise ValueError(
            f"{where}.compute: got {compute!r}, expected {LEAST_COMPUTE:g} to {MOST_COMPUTE:g} times the "
            "largest budget of the grids."
        )
    for key, allowed in (("objective", OBJECTIVES), ("flops_convention", tuple(COLUMN))):
        if values.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{where}.{key}: got {values[key]!r}, expected {' or '.join(allowed)}.")
    for key in ("lr", "batch_tokens"):
        if isinstance(values.get(key), list) and len(values[key]) > 1:
            raise ValueError(f"{where}.{key}: got {len(values[key])} rules, expected one. It is one run.")
    objective = values.get("objective", BlindPlan.objective)
    shared = {key: values[key] for key in ("sizes", "lr", "batch_tokens", "run") if key in values}
    seed = values.get("seed", 0)
    grid = read_grid(
        {"objectives": [objective], "seeds": [seed], "train_flops": [1.0], "label": LABEL, **shared}, where
    )
    return BlindPlan(
        **{f.name: getattr(grid, f.name) for f in fields(BlindPlan) if f.name in shared},
        objective=objective,
        compute=float(compute),
        flops_convention=values.get("flops_convention", "exact"),
        seed=grid.seeds.default[0],
    )
