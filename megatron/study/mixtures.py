"""Mixtures of a study: datasets of domains, and the weights of each mixture.

    mixtures:
      domains:                                   # as in a data-path file, relative to the working directory
        code: tokens/code_text_document
        wiki: tokens/wiki_text_document unique=400000      # its first tokens, repeated
      weights: {even: {code: 1, wiki: 1}}        # by name; a domain that is not named has none
      design: {n: 20, low: {wiki: 0.02}, high: {code: 0.6}, kind: spread}     # m01 to m20
    cells:
      - {size: d32, tokens: 1.0e+6, mixture: all}          # or a list of names

Each mixture is a data-path file in <directory>/mixtures, so that its shares and the repetition of
each domain are exact, and known before a run.
"""

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.option import REQUIRED, option
from megatron.config.presets import suggest_nearest
from megatron.config.section import check_known_keys
from megatron.config.yaml_file import is_finite
from megatron.io import write_atomic
from megatron.laws.mixture_design import design_mixtures
from megatron.study.cell import check_name

ALL = "all"  # as a cell's mixture: every one
Weights = dict[str, float]  # by domain


def check_weights(weights: Any, domains: Sequence[str], where: str) -> None:
    """Raise ValueError unless `weights` are numbers of 0 or more by domain."""
    check_known_keys(weights, domains, where)
    # is_finite is first, since text and null have no order
    if not all(is_finite(weight) and weight >= 0 for weight in weights.values()):
        raise ValueError(f"{where}: got {weights!r}, expected weights of 0 or more, as {{code: 0.3}}.")


@dataclass(frozen=True, kw_only=True)
class Design:
    """Mixtures that are chosen: n points within bounds by domain."""

    n: int = option(REQUIRED, "number of mixtures", above=0, unit="mixtures")
    low: Weights = option({}, "least weights")
    high: Weights = option({}, "largest weights")
    kind: str = option("spread", "spread evenly, or optimal for the exponential law", "spread", "optimal")

    def choose(self, domains: Sequence[str]) -> dict[str, Weights]:
        """Return the mixtures m1, m2, ... Raises ValueError for unknown domains or bad bounds."""
        for key, bounds in (("low", self.low), ("high", self.high)):
            check_weights(bounds, domains, f"mixtures.design.{key}")
        low = np.array([self.low.get(domain, 0.0) for domain in domains])
        high = np.array([self.high.get(domain, 1.0) for domain in domains])
        rows = design_mixtures(self.n, low, high, self.kind).tolist()
        width = len(str(self.n))
        return {f"m{i:0{width}}": dict(zip(domains, row, strict=True)) for i, row in enumerate(rows, 1)}


@dataclass(frozen=True, kw_only=True)
class Mixtures:
    """The section `mixtures` of a study."""

    domains: dict[str, str] = option(REQUIRED, "datasets by name")
    weights: dict[str, Weights] = option({}, "weights by mixture")
    design: Design | None = option(None, "mixtures to choose")

    @cached_property
    def by_name(self) -> dict[str, Weights]:
        """Weights of every mixture by name. Raises ValueError for bad names, domains, weights or bounds."""
        domains = list(self.domains)
        # columns of weights have the names of files
        if len({Path(shlex.split(str(entry))[0]).name for entry in self.domains.values()}) < len(domains):
            raise ValueError("mixtures.domains: got two datasets of one file name. Rename the files of one.")
        chosen = {} if self.design is None else self.design.choose(domains)
        for name, weights in self.weights.items():
            check_name(str(name), "mixtures.weights")
            check_weights(weights, domains, f"mixtures.weights.{name}")
            if name in (ALL, *chosen):
                raise ValueError(f"mixtures.weights.{name}: got a name of the design, or all. Change it.")
        return self.weights | chosen

    def write(self, name: str, directory: Path) -> Path:
        """Write the data-path file of a mixture, unless it is there, and return its path."""
        weights = self.by_name[name]
        # a domain without weight is not read
        text = "".join(f"{weights[key]} {entry}\n" for key, entry in self.domains.items() if weights.get(key))
        # the hash keeps the file of runs from before the study was edited
        path = directory / "mixtures" / hashlib.sha256(text.encode()).hexdigest()[:8] / f"{name}.txt"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
        return path


def select_mixtures(mixtures: Mixtures | None, names: list[str]) -> list[str]:
    """Return the names of a cell's mixtures. Raises ValueError for an unknown one."""
    listed = [] if mixtures is None else list(mixtures.by_name)
    for name in set(names) - {ALL, *listed}:
        raise ValueError(f"cells: mixture: got {name!r}; {suggest_nearest(name, listed)}")
    return listed if ALL in names else names
