"""Published scaling laws by name, each with its source.

Losses are in nats per token of the text and tokenizer of the authors, so losses of different laws are not
comparable. Exponents and optima are, where N is counted alike. The laws have no intervals, since the papers
publish constants without replicates.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from megatron.config.presets import suggest_nearest
from megatron.laws.law import PUBLISHED, Law
from megatron.study.cell import STEPLAW

ALL, NON_EMBEDDING = "all parameters", "parameters without embeddings"


@dataclass(frozen=True)
class PublishedLaw:
    """Published constants of a form.

    source   authors, year, arXiv number, and where in the paper the constants are
    counts   which parameters N includes
    ranges   {"N": [low, high], "D": [low, high]} of the runs, where the source states them
    note     caveats for users; may be empty
    """

    name: str
    source: str
    form: str
    params: dict[str, float]
    counts: str = ALL
    ranges: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    def to_law(self) -> Law:
        """Return a Law without replicates, whose intervals are NaN."""
        return Law(
            form=self.form,
            params=dict(self.params),
            objective=0.0,
            huber_delta=0.0,
            n_runs=0,
            ranges={name: list(ends) for name, ends in self.ranges.items()},
            warnings=[self.note] if self.note else [],
        )


@dataclass(frozen=True)
class HyperparameterLaw:
    """Optimal learning rate and batch size as powers, each (coefficient, exponent of N, exponent of D)."""

    name: str
    source: str
    lr: tuple[float, float, float]
    batch: tuple[float, float, float]
    counts: str = NON_EMBEDDING
    note: str = ""

    def learning_rate(self, N: ArrayLike, D: ArrayLike) -> np.ndarray:
        """Return the peak learning rate for N parameters, D tokens; broadcasts.

        Raises ValueError unless both are > 0.
        """
        return _evaluate_power(self.lr, N, D)

    def batch_tokens(self, N: ArrayLike, D: ArrayLike) -> np.ndarray:
        """Return the batch size in tokens for N parameters, D tokens; broadcasts.

        Raises ValueError as `learning_rate`.
        """
        return _evaluate_power(self.batch, N, D)

    def formula(self) -> str:
        """Return both powers in one line."""
        return "; ".join(
            f"{letter} = {c:g}" + "".join(f" {x}^{p:g}" for x, p in (("N", n), ("D", d)) if p)
            for letter, (c, n, d) in (("lr", self.lr), ("batch tokens", self.batch))
        )


def _evaluate_power(constants: tuple[float, float, float], N: ArrayLike, D: ArrayLike) -> np.ndarray:
    N, D = (np.asarray(v, dtype=float) for v in (N, D))
    for name, values in (("N", N), ("D", D)):
        if not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(f"{name}: got {values}, expected numbers above 0")
    coefficient, n, d = constants
    return coefficient * N**n * D**d


def _build_gadre_law(text: str, name: str, E: float, a: float, b: float, eta: float) -> PublishedLaw:
    return PublishedLaw(
        name,
        f"Gadre et al. 2024, arXiv 2403.08540, table of fitted constants, models trained on {text}; "
        "E + (a M^h + b M^-h) C^-h there, with h = eta / 2 and M = D/N",
        "over_training",
        # With C = 6 N D that formula is E + 6^-h (a N^-eta + b D^-eta). Here a contains its factor 6^-h, and
        # b does not (forms.over_training): 113.69 on C4 is a = 141.28 in the formula.
        {"E": E, "a": a, "b": b, "eta": eta},
        ranges={"N": [1.06e7, 6.9e9], "D": [5.3e7, 9.2e11]},
        note="Losses are on held-out C4; fitted to five small models, at D/N = 20 and 320.",
    )


_CHINCHILLA_RUNS = {"N": [7e7, 1.6e10], "D": [5e9, 5e11]}
_LAWS: tuple[PublishedLaw | HyperparameterLaw, ...] = (
    PublishedLaw(
        "chinchilla",
        "Hoffmann et al. 2022, arXiv 2203.15556, equation 10 (approach 3), as printed",
        "chinchilla",
        {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28},
        ranges=_CHINCHILLA_RUNS,
        note="Printed constants are rounded: their optimum at 5.8e23 FLOPs is 32B parameters, in the paper "
            "it is 40B. chinchilla-unrounded has more digits.",
    ),
    PublishedLaw(
        "chinchilla-unrounded",
        "Hoffmann et al. 2022, arXiv 2203.15556, approach 3, constants with more digits in the TeX source",
        "chinchilla",
        PUBLISHED["Hoffmann et al. 2022"],
        ranges=_CHINCHILLA_RUNS,
        note="A replication (besiroglu) could not reproduce this fit from the same runs.",
    ),
    PublishedLaw(
        "besiroglu",
        "Besiroglu et al. 2024, arXiv 2404.10102, abstract: 240 runs read from a figure of Hoffmann et al.",
        "chinchilla",
        PUBLISHED["Besiroglu et al. 2024"],
        ranges=_CHINCHILLA_RUNS,
    ),
    PublishedLaw(
        "muennighoff",
        "Muennighoff et al. 2023, arXiv 2305.16264, equation 5, constants fitted on C4 as in its code",
        "data_constrained",
        {
            "E": float(np.exp(0.6254804)), "A": float(np.exp(6.255414)), "B": float(np.exp(7.3049974)),
            "alpha": 0.3526596, "beta": 0.3526596, "R_D": 15.387756, "R_N": 5.309743,
        },
        ranges={"N": [7.1e6, 8.7e9], "D": [1e8, 9e11]},
        note="alpha and beta were tied. From the same runs R_D* is not identified above about 6.",
    ),
    _build_gadre_law(
        "C4", "gadre-c4", 1.5082605444147166, 113.69260327517962, 189.51552149611567,
        0.24247223927556466,
    ),
    _build_gadre_law(
        "RedPajama", "gadre-redpajama", 1.836648408738623, 166.210992120337, 366.6871979615622,
        0.2728507061786173,
    ),
    _build_gadre_law(
        "RefinedWeb", "gadre-refinedweb", 1.7344620893321105, 125.09569550155217, 246.2066862427996,
        0.25439484463174905,
    ),
    PublishedLaw(
        "kaplan",
        "Kaplan et al. 2020, arXiv 2001.08361, equation 1.5 with table 2",
        "kaplan",
        {"Nc": 6.4e13, "Dc": 1.8e13, "alpha_N": 0.076, "alpha_D": 0.103},
        counts=NON_EMBEDDING,
        ranges={"N": [768, 1.5e9], "D": [2.2e7, 2.3e10]},
        note="For models trained to convergence on D tokens, with a floor of 0: optima at a fixed compute "
            "differ from those of the paper, which are fitted to training curves.",
    ),
    HyperparameterLaw(
        "step-law",
        "Li et al. 2025, arXiv 2503.04715 (Step Law)",
        lr=(STEPLAW["coefficient"], STEPLAW["n"], STEPLAW["d"]),
        batch=(0.58, 0.0, 0.571),
        note="For AdamW with a final learning rate of 1e-5; batch in tokens.",
    ),
)  # fmt: skip
PUBLISHED_LAWS: dict[str, PublishedLaw | HyperparameterLaw] = {law.name: law for law in _LAWS}


def find_law(name: str | Path) -> tuple[Law | HyperparameterLaw, PublishedLaw | None]:
    """Return (law, publication) for a path of law.json or the name of a published law; a file has precedence.

    The publication of a file is None. Raises FileNotFoundError for neither, and ValueError for a file that is
    not a law.
    """
    path = Path(name)
    if path.is_file():
        return Law.load(path), None
    published = PUBLISHED_LAWS.get(str(name))
    if published is None:
        raise FileNotFoundError(
            f"{name}: got neither a file nor the name of a published law; "
            f"{suggest_nearest(str(name), list(PUBLISHED_LAWS))} (tools/predict.py --list)"
        )
    if isinstance(published, HyperparameterLaw):
        return published, None
    return published.to_law(), published
