"""A fitted scaling law: its constants, how sure they are, and what it predicts."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.run_dir import write_json

# Names of the constants of each form, in the order of the formula
FORMS: Mapping[str, tuple[str, ...]] = {"chinchilla": ("E", "A", "B", "alpha", "beta")}


def chinchilla(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike) -> np.ndarray:
    """L = E + A/N^alpha + B/D^beta (Hoffmann et al., arXiv 2203.15556, eq. 2), nats a token; broadcasts."""
    return (
        params["E"]
        + params["A"] * np.asarray(N, dtype=float) ** -np.asarray(params["alpha"])
        + params["B"] * np.asarray(D, dtype=float) ** -np.asarray(params["beta"])
    )


@dataclass(frozen=True, kw_only=True)
class Law:
    """What a fit found. Saved as law.json.

    params          constants of the form, in nats a token, N in parameters, D in tokens
    objective       sum over runs of Huber(log L - log Lhat, huber_delta)
    standard_error  spread of each constant over bootstrap replicates
    interval        {"level", "method", "n_bootstrap", "seed", "params": {name: [low, high]}, "derived": ...}
    derived         a_exponent: N_opt grows as C^a, b_exponent: D_opt as C^b
    replicates      the constants of each bootstrap replicate, for bands of whatever follows from them
    """

    form: str
    params: dict[str, float]
    objective: float
    huber_delta: float
    n_runs: int
    columns: dict[str, str] = field(default_factory=dict)
    filter: dict[str, Any] = field(default_factory=dict)
    ranges: dict[str, list[float]] = field(default_factory=dict)
    interval: dict[str, Any] = field(default_factory=dict)
    standard_error: dict[str, float] = field(default_factory=dict)
    derived: dict[str, float] = field(default_factory=dict)
    replicates: dict[str, list[float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    table: dict[str, str] = field(default_factory=dict)

    def loss(self, N: ArrayLike, D: ArrayLike) -> np.ndarray:
        """Predicted loss, nats a token, of N parameters after D tokens; broadcasts."""
        return chinchilla(self.params, N, D)

    def predict(self, N: float, D: float, level: float = 0.95) -> tuple[float, float, float]:
        """(loss, low, high): the fit's value and percentiles of the replicates; no run's own noise."""
        value = float(self.loss(N, D))
        if not self.replicates:
            return value, math.nan, math.nan
        spread = chinchilla({name: np.array(self.replicates[name]) for name in FORMS[self.form]}, N, D)
        low, high = np.quantile(spread, [(1 - level) / 2, (1 + level) / 2])
        return value, float(low), float(high)

    def formula(self) -> str:
        """One line, with digits enough to be pasted and computed with."""
        p = self.params
        return f"L = {p['E']:.5g} + {p['A']:.5g}/N^{p['alpha']:.5g} + {p['B']:.5g}/D^{p['beta']:.5g}"

    def save(self, path: str | Path) -> None:
        """Write law.json, whole or not at all. Floats keep every digit."""
        write_json(Path(path), {"form": self.form, "formula": self.formula()} | asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> "Law":
        """Read what `save` wrote. FileNotFoundError, or ValueError for another file."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such law; tools/fit_law.py writes one")
        try:
            held = json.loads(path.read_text())
            return cls(**{f.name: held[f.name] for f in fields(cls)})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a law ({error!r}); fit it again with tools/fit_law.py") from error


def exponents(alpha: ArrayLike, beta: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """(a, b) of N_opt ~ C^a and D_opt ~ C^b at C = k N D (Hoffmann et al., eq. 4)."""
    alpha, beta = np.asarray(alpha, dtype=float), np.asarray(beta, dtype=float)
    return beta / (alpha + beta), alpha / (alpha + beta)


def warnings_of(
    N: np.ndarray, D: np.ndarray, params: Mapping[str, float], replicates: Mapping[str, Sequence[float]]
) -> list[str]:
    """What a careful reader should know before believing the law, a sentence each."""
    told = []
    n_params = len(FORMS["chinchilla"])
    if len(N) < 3 * n_params:
        told.append(f"{len(N)} runs for {n_params} constants: the intervals rest on few points.")
    if np.ptp(np.log(D / N)) < 0.1:
        told.append("All runs have the same D/N: on a single ray N and D cannot be told apart.")
    for axis, values in (("N", N), ("D", D)):
        if len(np.unique(values)) < 3:
            told.append(f"{len(np.unique(values))} values of {axis}: its exponent needs three or more.")
    for name in ("alpha", "beta"):
        if not 0.02 < params[name] < 2.5:
            told.append(
                f"{name} = {params[name]:.3g} lies at the edge of what is searched: the form may not fit."
            )
    for name, values in replicates.items():
        low, high = np.quantile(values, [0.025, 0.975]) if len(values) else (1.0, 1.0)
        if name in ("A", "B") and low > 0 and high / low > 1e3:
            told.append(
                f"{name} ranges over a factor of {high / low:.0e} in the bootstrap: it is not identified."
            )
        if name == "E" and low < 0.05 * params["E"]:
            told.append("E may be near 0 in the bootstrap: the floor of the loss is not identified.")
    return told
