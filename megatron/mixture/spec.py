"""Specification of a mixture: the keys of its YAML file, and the weights that follow from them.

catalog: catalog                   a folder, relative to the file,
                                   or a URL such as s3://bucket/catalog
snapshot: {slim: 3}                versions of corpora;
                                   default: the current ones
corpora: [slim]                    default: all
where: "language = 'en'"           or a list: all of them
by: [source]                       properties that define a domain
weights: {Github: 0.7, C4: 0.3}    see weights.py
count: tokens                      unit of the weights' shares:
                                   tokens, or documents
schedule: {unit: steps, change: linear, points: [{at: 0, weights: ...}, {at:
1000, weights: ...}]}
adaptive: {rule: ado, every_steps: 10, delay_steps: 8}     or a custom
                                                           module:Class;
                                                           after the last
                                                           point of a schedule
dry: repeat                        or stop, redistribute
shuffle: true                      documents within a domain
chunk_size: 512                    documents of a chunk, for whole documents
tokenizer: gpt2                    of text; .bin/.idx datasets
                                   are tokenized already
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.option import REQUIRED, option
from megatron.config.section import read_section
from megatron.config.yaml_file import read_yaml
from megatron.io import wait_for_lock
from megatron.mixture.adaptive import WeightRule, make_rule
from megatron.mixture.catalog import Catalog
from megatron.mixture.distributor import DRY_POLICIES
from megatron.mixture.query import Query, Selection
from megatron.mixture.table import is_object_url
from megatron.mixture.weights import ARBITRARY, DomainWeights, compute_weights
from megatron.plan.mixture_use import mixture_folder

POINTS = "a list of {at: 0, weights: ...}"


def _read_words(value: Any, name: str) -> list[str]:
    """Read a word or a list of different words."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise ValueError(f"{name}: got {value!r}, expected words. Put numbers in quotes.")
    if repeated := next((word for word in words if words.count(word) > 1), None):
        raise ValueError(f"{name}: got {repeated!r} twice. Remove one of them.")
    return words


def _read_snapshot(value: Any, name: str) -> dict[str, int]:
    """Read versions of corpora."""
    is_mapping = isinstance(value, Mapping) and bool(value)
    if not is_mapping or any(type(version) is not int or version < 0 for version in value.values()):
        raise ValueError(
            f"{name}: got {value!r}, expected versions of corpora such as {{slim: 3}}. "
            "List them with scaling register CATALOG snapshots."
        )
    return {str(corpus): version for corpus, version in value.items()}


@dataclass(frozen=True, kw_only=True)
class AdaptiveSettings:
    """Weights that follow the model; in mixtures of documents, a step is a chunk."""

    rule: str = option(REQUIRED, "rule of the weights: ado, or your module:Class")
    every_steps: int = option(10, "steps between two changes of the weights", at_least=1, unit="steps")
    delay_steps: int = option(8, "steps from a change to its first use", at_least=1, unit="steps")


@dataclass(frozen=True, kw_only=True)
class SchedulePoint:
    """Weights from a step or token on."""

    at: int = option(REQUIRED, "first step or token", at_least=0, unit="-", expected="an integer from 0")
    weights: Any = option(REQUIRED, "weights, see weights.py")


def _read_points(value: Any, name: str) -> list[SchedulePoint]:
    """Read the points of a schedule."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: got {value!r}, expected {POINTS}")
    points = [read_section(SchedulePoint, point, f"{name}[{i}]") for i, point in enumerate(value)]
    starts = [point.at for point in points]
    if starts != sorted(set(starts)) or starts[0] != 0:
        raise ValueError(f"{name}: got at {starts}, expected 0 first and rising.")
    return points


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Weights that change at given points of the run."""

    unit: str = option("steps", "unit of the points", "steps", "tokens")
    change: str = option("at_once", "change between two points", "at_once", "linear")
    points: list[SchedulePoint] = option(REQUIRED, "weights and where they begin", read=_read_points)


@dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    """Documents of a mixture, the domains that they form, and the weights of the domains."""

    catalog: str = option(REQUIRED, "path of the catalog", expected="the path of a catalog.")
    snapshot: Any = option(None, "versions of corpora; default: current", read=_read_snapshot)
    corpora: list[str] = option([], "corpora of the catalog; default: all", read=_read_words)
    where: list[str] = option([], "conditions that documents satisfy", read=_read_words)
    by: list[str] = option([], "properties that define a domain", read=_read_words)
    weights: Any = option(None, "weights, see weights.py; default: by size")
    count: str = option("tokens", "unit of the weights' shares", "tokens", "documents")
    schedule: ScheduleSettings | None = option(None, "weights that change at given points")
    adaptive: AdaptiveSettings | None = option(None, "weights that follow the model")
    dry: str = option("repeat", "what follows the last document of a domain", *DRY_POLICIES)
    shuffle: bool = option(True, "shuffle the documents of a domain", expected="one of True, False.")
    chunk_size: int = option(512, "documents of a chunk", at_least=1, at_most=1 << 20, unit="documents")
    tokenizer: str | None = option(None, "tokenizer of text", expected="a name such as gpt2, or a folder.")


@dataclass(frozen=True)
class MixtureSpec:
    """The file, read and checked as far as possible without the catalog.

    raw   the keys and values as written, which compute_sha256 hashes
    """

    path: Path
    raw: dict[str, Any]
    settings: MixtureSettings

    def open_catalog(self) -> Catalog:
        """Open the catalog, or its snapshot."""
        location: Path | str = self.settings.catalog
        location = location if is_object_url(location) else self.path.parent / location
        return Catalog(location, read_only=True, snapshot=self.settings.snapshot)

    @property
    def counts_tokens(self) -> bool:
        """True if weights are shares of tokens, False if they are shares of documents."""
        # an arbitrary mixture has one domain, whose share needs no counts
        return self.settings.count == "tokens" and self.settings.weights != ARBITRARY

    def select_documents(self, count_tokens: bool) -> Selection:
        """Return the documents of the catalog.

        Raises what opening and querying raise.
        """
        query = Query(tuple(self.settings.corpora), tuple(self.settings.where))
        with self.open_catalog() as catalog:
            return query.run(catalog, self.settings.by, count_tokens)

    def compute_sha256(self) -> str:
        """Return a hash of all keys except the location and snapshot of the catalog.

        The identity of the documents covers what the snapshot contains.
        """
        # sort_keys: the order of the keys in the file does not matter
        content = {key: value for key, value in self.raw.items() if key not in ("catalog", "snapshot")}
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def build_weights(
        self, selection: Selection, natural: np.ndarray, factors: np.ndarray, per_step: int, sizes: np.ndarray
    ) -> tuple[DomainWeights, WeightRule | None]:
        """Return the weights of each chunk, and the rule if they follow the model.

        natural    sizes of the domains, float64 [K],
                   to which inferred weights are proportional
        factors    converts shares of the weights' unit to shares of the units
                   of a chunk, float64 [K]
        per_step   units of the schedule in a chunk: 1, or tokens
        sizes      sizes of the domains in units of the rule, float64 [K]
        """

        def normalize(written: Any) -> np.ndarray:
            try:
                shares = np.asarray(natural, dtype=np.float64)
                weights = compute_weights(written, self.settings.by, selection.domains, shares) * factors
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from error
            if not weights.sum() > 0:
                raise ValueError(
                    f"{self.path}: got weights only for domains without text. Give a weight to others."
                )
            return weights / weights.sum()

        adaptive, schedule = self.settings.adaptive, self.settings.schedule
        entries = [(0, self.settings.weights)]
        if schedule is not None:
            entries = [(point.at, point.weights) for point in schedule.points]
        # rounded up: weights change at the first
        # step that begins at or after the point
        points = [(-(-at // per_step), normalize(weights)) for at, weights in entries]
        linear = schedule is not None and schedule.change == "linear"
        if adaptive is None:
            return DomainWeights(points, linear), None
        # after a schedule the rule begins with the weights of its last point
        rule = make_rule(adaptive.rule, points[-1][1], sizes, str(self.path))
        return DomainWeights(points, linear, adaptive.delay_steps), rule


def read_spec(path: str | Path) -> MixtureSpec:
    """Read a mixture.

    Raises FileNotFoundError, or ValueError with the invalid key.
    """
    raw = read_yaml(path)
    settings: MixtureSettings = read_section(MixtureSettings, raw, str(path), separator=": ")
    return MixtureSpec(Path(path), raw, settings)


def build_step_weights(
    spec: MixtureSpec, selection: Selection, tokens: np.ndarray, tokens_per_step: int
) -> tuple[DomainWeights, WeightRule | None]:
    """Return the shares of tokens in each training step, and the rule if they follow the model."""
    natural, factors = tokens, np.ones(len(tokens))
    if not spec.counts_tokens:
        # Domains of 10 and 30 documents with 100 and 900 tokens: document weights
        # [0.5, 0.5] times tokens per document [10, 30] are in proportion 5 to 15,
        # token shares [0.25, 0.75].
        natural, factors = selection.n_documents, tokens / selection.n_documents
    schedule = spec.settings.schedule
    per_step = tokens_per_step if schedule is not None and schedule.unit == "tokens" else 1
    # a rule counts tokens, whatever the first weights count
    return spec.build_weights(selection, natural, factors, per_step, tokens)


def build_chunk_weights(spec: MixtureSpec, selection: Selection) -> tuple[DomainWeights, WeightRule | None]:
    """Return the shares of documents in each chunk, and the rule if they follow the model.

    Steps of a schedule are chunks, and so are every_steps and delay_steps of a
    rule. Shares of tokens become shares of documents by the mean tokens of a
    domain's documents, which are in the catalog. Raises ValueError for a
    schedule in tokens, and for weights that follow a model and count tokens.
    """
    schedule, documents = spec.settings.schedule, selection.n_documents
    if schedule is not None and schedule.unit == "tokens":
        raise ValueError(
            f"{spec.path}: got a schedule in tokens, expected steps for documents. Use dataset.mixture."
        )
    if not spec.counts_tokens:
        return spec.build_weights(selection, documents, np.ones(len(documents)), 1, documents)
    if spec.settings.adaptive is not None:
        raise ValueError(
            f"{spec.path}: got adaptive weights of documents that count tokens. Add count: documents."
        )
    assert selection.n_tokens is not None, "the query counts tokens if the weights do"
    natural = np.array(selection.n_tokens)
    # documents per token; 0 for a domain whose documents are all empty
    factors = np.divide(documents, natural, out=np.zeros(len(documents)), where=natural > 0)
    return spec.build_weights(selection, natural, factors, 1, natural)


def open_selection(spec: MixtureSpec) -> Selection:
    """Return the documents of a mixture, from a file in its folder that processes map.

    The query runs once for each version of the catalog. A folder that cannot be
    written keeps no file.
    """
    folder = mixture_folder(spec.path)
    with spec.open_catalog() as catalog:
        content = [spec.compute_sha256(), str(catalog.path), catalog.versions]
    path = folder / f"selected-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}.arrow"
    if not path.is_file():
        selection = spec.select_documents(spec.counts_tokens)
        if not os.access(folder.parent if not folder.exists() else folder, os.W_OK):
            return selection
        folder.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(folder / ".lock"):
            selection.save(path)
            # processes that map the file of an earlier version keep it
            for old in set(folder.glob("selected-*.arrow")) - {path}:
                with suppress(OSError):
                    old.unlink()
    return Selection.load(path)
