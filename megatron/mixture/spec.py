"""Specification of a mixture as a YAML file, and its preparation as tokenized domains with weights.

catalog: catalog                   a folder, relative to the file, or a URL such as s3://bucket/catalog
snapshot: 5b482d8e36f8a1c0         default: the current state of the catalog
corpora: [slim]                    default: all
where: "language = 'en'"           or a list: all of them
by: [source]                       properties that define a domain
list_domains: once                 or each: domains of a document with several values of such a property
weights: {Github: 0.7, C4: 0.3}    see weights.py
count: tokens                      unit of the weights' shares: tokens, or documents
schedule: {unit: steps, change: linear, points: [{at: 0, weights: ...}, {at: 1000, weights: ...}]}
adaptive: {rule: ado, every_steps: 10, delay_steps: 8}     instead of a schedule;
                                                                 rule loss, or a custom module:Class
dry: repeat                        or stop, redistribute
shuffle: true                      documents within a domain
tokenizer: gpt2                    of text; .bin/.idx datasets are tokenized already
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.yaml_file import read_yaml
from megatron.data import open_dataset
from megatron.data.sidecar import read_sidecar
from megatron.io import open_partial_folder, publish_files, wait_for_lock, write_json
from megatron.log import get_logger
from megatron.mixture.adaptive import Ado, AdoConfig, LossProportional, WeightLog, WeightRule
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.list_domains import find_weighted_values
from megatron.mixture.catalog.query import Query, QueryResult, SourceFile
from megatron.mixture.catalog.storage import is_object_url
from megatron.mixture.catalog.tars import TAR_SUFFIXES, write_texts
from megatron.mixture.custom_rule import make_rule
from megatron.mixture.distributor import ConstantWeights, DomainWeights
from megatron.mixture.settings import AdaptiveSettings, MixtureSettings, read_mixture_settings
from megatron.mixture.weights import ARBITRARY, WeightSchedule, compute_weights
from megatron.plan.datapaths import compare_eods
from megatron.plan.mixture_use import RESOLVED, ResolvedMixture, mixture_folder, read_resolved
from megatron.text.preprocess import PreprocessOptions, preprocess

DOCUMENTS, TOKENS = "documents.arrow", "tokens"

log = get_logger(__name__)


@dataclass(frozen=True)
class MixtureSpec:
    """The file, read and checked as far as possible without the catalog.

    raw   the keys and values as written, which compute_sha256 hashes
    """

    path: Path
    raw: dict[str, Any]
    settings: MixtureSettings

    @property
    def catalog(self) -> Path | str:
        """Path or URL of the catalog."""
        location = self.settings.catalog
        return location if is_object_url(location) else self.path.parent / location

    def open_catalog(self, snapshot: str | None = None) -> Catalog:
        """Open the snapshot of the catalog, and store it, so that a run can be resumed with it.

        snapshot   of a saved query, instead of the one in the file
        """
        catalog = Catalog(self.catalog, read_only=True, snapshot=snapshot or self.settings.snapshot)
        catalog.pin()
        return catalog

    @property
    def by(self) -> tuple[str, ...]:
        """Properties that define a domain."""
        return tuple(self.settings.by)

    @property
    def counts_tokens(self) -> bool:
        """True if weights are shares of tokens, False if they are shares of documents."""
        # an arbitrary mixture has one domain, whose share needs no counts
        return self.settings.count == "tokens" and self.settings.weights != ARBITRARY

    @property
    def adaptive(self) -> AdaptiveSettings | None:
        """Rule and its steps; None: weights do not follow the model."""
        return self.settings.adaptive

    def make_query(self) -> Query:
        """Return the query that selects the documents."""
        settings = self.settings
        written = [settings.weights] if settings.schedule is None else [
            point.weights for point in settings.schedule.points
        ]  # fmt: skip
        weighted: dict[str, set[str]] = {}
        for weights in written:
            for name, values in find_weighted_values(weights, self.by).items():
                weighted.setdefault(name, set()).update(values)
        query = Query(tuple(settings.corpora), (), settings.list_domains, weighted)
        for condition in settings.where:
            query = query.where(condition)
        return query

    def compute_sha256(self) -> str:
        """Return a hash of all keys except the location and snapshot of the catalog.

        The identity of the documents covers what the snapshot contains.
        """
        # sort_keys: the order of the keys in the file does not matter
        content = {key: value for key, value in self.raw.items() if key not in ("catalog", "snapshot")}
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def read_spec(path: str | Path) -> MixtureSpec:
    """Read a mixture. Raises FileNotFoundError, or ValueError with the invalid key."""
    raw = read_yaml(path)
    return MixtureSpec(Path(path), raw, read_mixture_settings(raw, str(path)))


def prepare_mixture(path: str | Path, quiet: bool = False, verify: bool = False) -> ResolvedMixture:
    """Query the catalog, tokenize the text, and write the result to the folder beside the file.

    Existing results are reused. Several processes may call this at once; one of them does the work. Size and
    modification time of every file must be those of the catalog; with `verify` its content too. Raises what
    reading, querying and tokenizing raise.
    """
    spec = read_spec(path)
    folder = mixture_folder(path)
    folder.mkdir(parents=True, exist_ok=True)
    # only one process prepares; the others wait and find the result
    with wait_for_lock(folder / ".lock"):
        with spec.open_catalog() as catalog:
            result = spec.make_query().run(catalog, spec.by)
            result.warn_missing_checksums(spec.catalog)
            for file in result.files if verify else ():
                file.verify()
            samples = catalog.locate_texts(
                [file.id for file in result.files if file.path.endswith(TAR_SUFFIXES)]
            )
        prefixes = [_tokenize_file(file, spec, folder, quiet, samples.get(file.id)) for file in result.files]
        tokenizer = _check_tokenizer(prefixes)
        # changes with the documents, the specification, or the tokenizer
        documents_identity = result.compute_identity()
        sums = [documents_identity, spec.compute_sha256(), tokenizer.get("sha256")]
        identity = hashlib.sha256(json.dumps(sums).encode()).hexdigest()
        if not _is_prepared(path, identity, documents_identity):
            tokens = count_domain_tokens(result, prefixes)
            weights = compute_first_weights(spec, result, tokens)
            resolved = {
                "identity": identity,
                "snapshot": result.snapshot,
                "tokenizer": tokenizer,
                "domains": list(result.names),
                "documents": result.n_documents.tolist(),
                "tokens": tokens.tolist(),
                "weights": weights.tolist(),
                "pairs": prefixes,
            }
            with open_partial_folder(folder / "prepared") as partial:
                replace(result, mixture=identity).save(partial / DOCUMENTS)
                write_json(partial / RESOLVED, resolved)
                # RESOLVED last, because a folder without it counts as not prepared
                publish_files([(partial / name, folder / name) for name in (DOCUMENTS, RESOLVED)])
    return read_resolved(path)


def _is_prepared(path: str | Path, identity: str, documents_identity: str) -> bool:
    """Return whether both files of a prepared mixture are those of this identity.

    Older versions replaced them one after the other, so that a kill could leave documents of another mixture.
    """
    folder = mixture_folder(path)
    if not (folder / RESOLVED).is_file() or read_resolved(path).identity != identity:
        return False
    try:
        return QueryResult.load(folder / DOCUMENTS).compute_identity() == documents_identity
    except (FileNotFoundError, ValueError):
        return False


def compute_first_weights(spec: MixtureSpec, result: QueryResult, tokens: np.ndarray) -> np.ndarray:
    """Return the shares of the tokens at the beginning, float64 [K]."""
    schedule = spec.settings.schedule
    written = spec.settings.weights if schedule is None else schedule.points[0].weights
    return _compute_token_shares(spec, written, result, tokens)


def _compute_token_shares(
    spec: MixtureSpec, written: Any, result: QueryResult, tokens: np.ndarray
) -> np.ndarray:
    """Return weights as shares of tokens, whether they are written for tokens or documents."""
    documents = result.n_documents
    if spec.counts_tokens:
        return _normalize_shares(spec, written, result, tokens, np.ones(len(tokens)))
    # Converted to shares of tokens.
    # Domains of 10 and 30 documents with 100 and 900 tokens: document weights [0.5, 0.5] times tokens per
    # document [10, 30] are in proportion 5 to 15, token shares [0.25, 0.75].
    return _normalize_shares(spec, written, result, documents, tokens / documents)


def _normalize_shares(
    spec: MixtureSpec, written: Any, result: QueryResult, natural: np.ndarray, factors: np.ndarray
) -> np.ndarray:
    """Return weights times `factors`, of sum 1.

    natural   sizes of the domains, to which inferred weights are proportional
    """
    try:
        weights = compute_weights(written, spec.by, result.domains, natural.astype(np.float64)) * factors
    except ValueError as error:
        raise ValueError(f"{spec.path}: {error}") from error
    if not weights.sum() > 0:
        raise ValueError(f"{spec.path}: got weights only for domains without text. Give a weight to others.")
    return weights / weights.sum()


def build_step_weights(
    spec: MixtureSpec, result: QueryResult, tokens: np.ndarray, tokens_per_step: int
) -> tuple[DomainWeights, WeightRule | None]:
    """Return the weights of each step, and the rule that computes them if they follow the model."""
    first = compute_first_weights(spec, result, tokens)
    schedule = spec.settings.schedule
    if schedule is None:
        return _build_adaptive(spec, first, tokens)
    per_step = tokens_per_step if schedule.unit == "tokens" else 1
    return WeightSchedule(
        # rounded up: weights change at the first step that begins at or after the point
        [-(-point.at // per_step) for point in schedule.points],
        [_compute_token_shares(spec, point.weights, result, tokens) for point in schedule.points],
        schedule.change == "linear",
    ), None


def build_chunk_weights(spec: MixtureSpec, result: QueryResult) -> tuple[DomainWeights, WeightRule | None]:
    """Return the weights of chunks of documents, and the rule that computes them if they follow the model.

    Steps of a schedule are chunks, and so are every_steps and delay_steps of a rule. Shares of tokens become
    shares of documents by the mean tokens of a domain's documents, which are in the catalog. Raises
    ValueError for a schedule in tokens, and for weights that follow a model and count tokens.
    """
    schedule, documents = spec.settings.schedule, result.n_documents
    if schedule is not None and schedule.unit == "tokens":
        raise ValueError(
            f"{spec.path}: got a schedule in tokens, expected steps for documents. Use dataset.mixture."
        )
    natural, factors = documents, np.ones(len(documents))
    if spec.counts_tokens:
        if spec.adaptive is not None:
            raise ValueError(
                f"{spec.path}: got adaptive weights of documents that count tokens. Add count: documents."
            )
        assert result.n_tokens is not None, "the query counts tokens if the weights do"
        natural = np.array(result.n_tokens)
        # documents per token; 0 for a domain whose documents are all empty
        factors = np.divide(documents, natural, out=np.zeros(len(documents)), where=natural > 0)
    if schedule is None:
        first = _normalize_shares(spec, spec.settings.weights, result, natural, factors)
        return _build_adaptive(spec, first, natural)
    points = schedule.points
    weights = [_normalize_shares(spec, point.weights, result, natural, factors) for point in points]
    return WeightSchedule([point.at for point in points], weights, schedule.change == "linear"), None


def _build_adaptive(
    spec: MixtureSpec, first: np.ndarray, natural: np.ndarray
) -> tuple[DomainWeights, WeightRule | None]:
    adaptive = spec.adaptive
    if adaptive is None:
        return ConstantWeights(first), None
    return WeightLog(first, adaptive.delay_steps), _make_rule(spec, adaptive.rule, first, natural)


def _make_rule(spec: MixtureSpec, name: str, first: np.ndarray, natural: np.ndarray) -> WeightRule:
    """Return the rule of that name. A custom rule, module:Class, gets the first weights, float64 [K]."""
    if name == "ado":
        # a domain with weight 0 at the beginning has prior 0 and stays excluded
        return Ado(np.where(first > 0, natural, 0), AdoConfig())
    if name == "loss":
        return LossProportional(first)
    return make_rule(name, first, str(spec.path))


def count_domain_tokens(result: QueryResult, prefixes: Sequence[str]) -> np.ndarray:
    """Return the tokens of each domain, int64 [K]."""
    tokens = np.zeros(len(result.domains), dtype=np.int64)
    columns = [result.get_column(name) for name in ("domain", "file", "begin", "end")]
    for number, prefix in enumerate(prefixes):
        # ends [n + 1]: tokens before each document, so that an interval is a difference
        ends = np.concatenate([[0], np.cumsum(open_dataset(prefix).document_tokens)])
        mask = columns[1] == number
        domain, begin, end = (column[mask] for column in (columns[0], columns[2], columns[3]))
        # not +=, which would add only one of several intervals of the same domain
        np.add.at(tokens, domain, ends[end] - ends[begin])
    return tokens


def _tokenize_file(
    file: SourceFile,
    spec: MixtureSpec,
    folder: Path,
    quiet: bool,
    samples: tuple[np.ndarray, np.ndarray] | None,
) -> str:
    """Return the prefix of the .bin/.idx dataset with a file's documents. Text is tokenized, once.

    samples   (begin, size) of the samples of a tar archive

    Raises ValueError for a file that is not as registered.
    """
    path = file.check_unchanged()
    if path.suffix == ".bin":
        return str(path.with_suffix(""))
    tokenizer = spec.settings.tokenizer
    if tokenizer is None:
        raise ValueError(f"{spec.path}: no tokenizer, but {path} is text. Add tokenizer: gpt2, or a folder.")
    made_from = [file.path, file.n_bytes, file.mtime_ns, file.text_key, str(tokenizer)]
    # everything that determines the tokens is in the file name, so that old results are not reused
    made_of = json.dumps(made_from + ([] if file.sha256 is None else [file.sha256]))
    name = f"{path.name.partition('.')[0]}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    prefix = folder / TOKENS / f"{name}_{file.text_key}_document"
    # the sidecar is renamed last, so that it marks a complete dataset
    if not prefix.with_name(prefix.name + ".json").is_file():
        log.info("tokenizing %s", path)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        options = PreprocessOptions(
            keys=(file.text_key,), append_eod=True, skip_bad_lines=True, quiet=quiet, overwrite=True
        )
        if samples is None:
            preprocess([str(path)], prefix.with_name(name), str(tokenizer), options)
        else:
            lines = prefix.with_name(f"{name}.jsonl")
            places = zip(*map(np.ndarray.tolist, samples), strict=True)
            write_texts(file.unpack(folder), places, file.text_key, lines)
            preprocess([str(lines)], prefix.with_name(name), str(tokenizer), options)
            lines.unlink()
    # rows of the catalog and of the dataset must match, because intervals are in rows
    n = open_dataset(prefix).n_documents
    if n != file.n_documents:
        raise ValueError(
            f"{path}: {file.n_documents:,} documents are registered, {n:,} tokenized. Correct the lines that "
            "tools/register_corpus.py CATALOG broken lists, and register it again."
        )
    return str(prefix)


def _check_tokenizer(prefixes: Sequence[str]) -> dict[str, Any]:
    """Return the tokenizer of the datasets. Raises ValueError if they differ."""
    tokenizer: dict[str, Any] = {}
    for prefix in prefixes:
        recorded = read_sidecar(prefix).get("tokenizer") or {}
        if tokenizer and recorded.get("sha256") != tokenizer.get("sha256"):
            raise ValueError(
                f"{prefix}: made with another tokenizer than {prefixes[0]}. Use the same tokenizer for both."
            )
        tokenizer = tokenizer or recorded
    for warning in compare_eods(prefixes, allow_mixed=True):
        log.warning("%s", warning)
    return tokenizer
