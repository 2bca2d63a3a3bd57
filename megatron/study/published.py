"""Published scaling laws by name, each with its source.

Losses are in nats per token of the text
and tokenizer of the authors, so losses of different
laws are not comparable. Exponents and optima are,
where N is counted alike. The laws have no intervals,
since the papers publish constants without replicates.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from megatron.config.presets import suggest_nearest
from megatron.config.yaml_file import read_yaml
from megatron.laws.law import Law
from megatron.laws.prediction import check_positive

LAWS_FILE = Path(__file__).with_name("published_laws.yaml")  # a link to utils/, a copy in a wheel


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
    counts: str
    ranges: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    def to_law(self) -> Law:
        """Return a Law without replicates, whose intervals are NaN."""
        about: dict[str, Any] = {"ranges": self.ranges, "warnings": [self.note] if self.note else []}
        return Law(form=self.form, params=self.params, objective=0.0, huber_delta=0.0, n_runs=0, **about)


@dataclass(frozen=True)
class HyperparameterLaw:
    """Optimal learning rate and batch size as powers, each (coefficient, exponent of N, exponent of D)."""

    name: str
    source: str
    lr: list[float]
    batch: list[float]
    counts: str
    note: str = ""

    def predict(self, N: float, D: float) -> tuple[float, float]:
        """Return the peak learning rate and the batch in tokens for N parameters, D tokens, both above 0."""
        check_positive(N=N, D=D)
        rate, batch = (c * N**n * D**d for c, n, d in (self.lr, self.batch))
        return rate, batch

    def formula(self) -> str:
        """Return both powers in one line."""
        return "; ".join(
            f"{letter} = {c:g}" + "".join(f" {x}^{p:g}" for x, p in (("N", n), ("D", d)) if p)
            for letter, (c, n, d) in (("lr", self.lr), ("batch tokens", self.batch))
        )


@cache
def load_published() -> dict[str, PublishedLaw | HyperparameterLaw]:
    """Return the laws of utils/published_laws.yaml by name."""
    return {
        name: HyperparameterLaw(name, **entry) if "lr" in entry else PublishedLaw(name, **entry)
        for name, entry in read_yaml(LAWS_FILE).items()
    }


def find_law(name: str | Path) -> tuple[Law | HyperparameterLaw, PublishedLaw | None]:
    """Return (law, publication) for a path of law.json or the name of a published law; a file has precedence.

    The publication of a file is None. Raises FileNotFoundError
    for neither, and ValueError for a file that is not a law.
    """
    path = Path(name)
    if path.is_file():
        return Law.load(path), None
    published = load_published().get(str(name))
    if published is None:
        raise FileNotFoundError(
            f"{name}: got neither a file nor the name of a published law; "
            f"{suggest_nearest(str(name), list(load_published()))} (scaling predict --list)"
        )
    if isinstance(published, HyperparameterLaw):
        return published, None
    return published.to_law(), published
