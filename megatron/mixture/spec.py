"""A mixture as a YAML file, and what it comes to: documents in domains, tokenised, with weights.

catalog: catalog.duckdb            relative to the file
corpora: [slim]                    by itself all
where: "language = 'en'"           or a list: all of them
by: [source]                       properties that make a domain
weights: {Github: 0.7, C4: 0.3}    see weights.py
count: tokens                      what weights are shares of: tokens, or documents
schedule: {unit: steps, change: linear, points: [{at: 0, weights: ...}, {at: 1000, weights: ...}]}
adaptive: {rule: ado, every_steps: 10, delay_steps: 8}     instead of a schedule;
                                                                 rule loss, or module:Class of one's own
dry: repeat                        or stop, redistribute
shuffle: true                      documents within a domain
tokenizer: gpt2                    of text; pairs have theirs
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.datapaths import compare_eods, read_sidecar
from megatron.config.mixture_use import RESOLVED, Resolved, folder_of, read_resolved
from megatron.config.yaml_file import read_yaml
from megatron.data.indexed import IndexedTokens
from megatron.data.preprocess import Options, preprocess
from megatron.io import wait_for_lock
from megatron.log import get_logger
from megatron.mixture.adaptive import Adaptive, Ado, AdoConfig, Log, LossProportional
from megatron.mixture.catalog import Catalog
from megatron.mixture.distributor import Constant, DomainWeights
from megatron.mixture.own_rule import make_rule
from megatron.mixture.query import Query, Result, SourceFile
from megatron.mixture.spec_check import check_spec
from megatron.mixture.tars import TARS, write_texts
from megatron.mixture.weights import Schedule, weights_of
from megatron.run_dir import write_json

DOCUMENTS, TOKENS = "documents.arrow", "tokens"

log = get_logger(__name__)


@dataclass(frozen=True)
class Spec:
    """The file, read and checked as far as that goes without the catalog."""

    path: Path
    told: dict[str, Any]

    @property
    def catalog(self) -> Path:
        """Where the catalog is."""
        return self.path.parent / self.told["catalog"]

    @property
    def by(self) -> tuple[str, ...]:
        """Properties that make a domain."""
        return tuple(_listed(self.told.get("by")))

    @property
    def counts_tokens(self) -> bool:
        """Whether weights are shares of tokens, not of documents."""
        return self.told.get("count", "tokens") == "tokens"

    @property
    def adaptive(self) -> dict[str, Any] | None:
        """Rule, every_steps and delay_steps; None: weights do not follow the model."""
        told = self.told.get("adaptive")
        return None if told is None else {"every_steps": 10, "delay_steps": 8, **told}

    def query(self) -> Query:
        """Which documents."""
        query = Query(tuple(_listed(self.told.get("corpora"))))
        for condition in _listed(self.told.get("where")):
            query = query.where(condition)
        return query

    def sha256(self) -> str:
        """Of what is asked for, wherever the catalog lies."""
        told = {key: value for key, value in self.told.items() if key != "catalog"}
        return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def read_spec(path: str | Path) -> Spec:
    """Read a mixture. FileNotFoundError, or ValueError with the key that cannot be used."""
    told = read_yaml(path)
    check_spec(told, str(path))
    return Spec(Path(path), told)


def prepare(path: str | Path, quiet: bool = False, verify: bool = False) -> Resolved:
    """Ask the catalog, tokenise what is text, and write down beside the file what came of it.

    What is there already is kept; several processes may ask at once, and one of them does the work. The size
    and time of change of every file must be those of the catalog; `verify`: its content too. Raises what
    reading, querying and tokenising raise.
    """
    spec = read_spec(path)
    folder = folder_of(path)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        with Catalog(spec.catalog, read_only=True) as catalog:
            result = spec.query().run(catalog, spec.by)
            result.warn_without_sums(spec.catalog)
            for file in result.files if verify else ():
                file.verify()
            samples = catalog.text_places([one.id for one in result.files if one.path.endswith(TARS)])
        pairs = [_tokens_of(file, spec, folder, quiet, samples.get(file.id)) for file in result.files]
        tokenizer = _one_tokenizer(pairs)
        sums = [result.identity(), spec.sha256(), tokenizer.get("sha256")]
        identity = hashlib.sha256(json.dumps(sums).encode()).hexdigest()
        if (folder / RESOLVED).is_file() and read_resolved(path).identity == identity:
            return read_resolved(path)
        result.save(folder / DOCUMENTS)
        tokens = tokens_of_domains(result, pairs)
        weights = first_weights(spec, result, tokens)
        write_json(
            folder / RESOLVED,
            {
                "identity": identity,
                "tokenizer": tokenizer,
                "domains": list(result.names),
                "documents": result.n_documents.tolist(),
                "tokens": tokens.tolist(),
                "weights": weights.tolist(),
                "pairs": pairs,
            },
        )
    return read_resolved(path)


def first_weights(spec: Spec, result: Result, tokens: np.ndarray) -> np.ndarray:
    """Shares of the tokens at the beginning, float64 [K]."""
    points = _listed((spec.told.get("schedule") or {}).get("points"))
    written = points[0]["weights"] if points else spec.told.get("weights")
    return _weights(spec, written, result, tokens)


def _weights(spec: Spec, written: Any, result: Result, tokens: np.ndarray) -> np.ndarray:
    documents = result.n_documents
    if spec.counts_tokens:
        return _shares(spec, written, result, tokens, np.ones(len(tokens)))
    return _shares(spec, written, result, documents, tokens / documents)  # as shares of tokens


def _shares(spec: Spec, written: Any, result: Result, natural: np.ndarray, turned: np.ndarray) -> np.ndarray:
    """Weights, each times `turned`, of sum 1; `natural`: what inferred ones follow."""
    try:
        weights = weights_of(written, spec.by, result.domains, natural.astype(np.float64)) * turned
    except ValueError as error:
        raise ValueError(f"{spec.path}: {error}") from error
    if not weights.sum() > 0:
        raise ValueError(f"{spec.path}: got weights of domains without text alone. Give others a weight.")
    return weights / weights.sum()


def weights_over_time(
    spec: Spec, result: Result, tokens: np.ndarray, tokens_per_step: int
) -> tuple[DomainWeights, Adaptive | None]:
    """The weights of each step, and the rule that finds them if they follow the model."""
    first = first_weights(spec, result, tokens)
    schedule = spec.told.get("schedule")
    if schedule is None:
        return _following(spec, first, tokens)
    per_step = tokens_per_step if schedule.get("unit") == "tokens" else 1
    points = _listed(schedule.get("points"))
    return Schedule(
        [-(-int(point["at"]) // per_step) for point in points],
        [_weights(spec, point["weights"], result, tokens) for point in points],
        schedule.get("change") == "linear",
    ), None


def document_weights(spec: Spec, result: Result) -> tuple[DomainWeights, Adaptive | None]:
    """Weights of chunks of whole documents, over chunks where they have a schedule in steps, and the rule
    that finds them if they follow the model: its every_steps and delay_steps are chunks.

    Shares of tokens become shares of documents by the mean tokens of a domain's documents, which the catalog
    has. ValueError for a mixture whose weights follow the tokens of training, or a model and count tokens.
    """
    schedule, documents = spec.told.get("schedule"), result.n_documents
    if (schedule or {}).get("unit") == "tokens":
        raise ValueError(f"{spec.path}: weights that follow training or its tokens; use dataset.mixture")
    natural, turned = documents, np.ones(len(documents))
    if spec.counts_tokens:
        if spec.adaptive is not None:
            raise ValueError(f"{spec.path}: weights of documents that follow a model; add count: documents")
        assert result.n_tokens is not None, "the query counts tokens where weights do"
        natural = np.array(result.n_tokens)
        turned = np.divide(documents, natural, out=np.zeros(len(documents)), where=natural > 0)
    if schedule is None:
        first = _shares(spec, spec.told.get("weights"), result, natural, turned)
        return _following(spec, first, natural)
    points = _listed(schedule.get("points"))
    weights = [_shares(spec, point["weights"], result, natural, turned) for point in points]
    return Schedule([int(point["at"]) for point in points], weights, schedule.get("change") == "linear"), None


def _following(spec: Spec, first: np.ndarray, natural: np.ndarray) -> tuple[DomainWeights, Adaptive | None]:
    told = spec.adaptive
    if told is None:
        return Constant(first), None
    return Log(first, told["delay_steps"]), _rule(spec, told["rule"], first, natural)


def _rule(spec: Spec, name: str, first: np.ndarray, natural: np.ndarray) -> Adaptive:
    """The rule of a name; one's own, module:Class, is made with the first weights, float64 [K]."""
    if name == "ado":
        return Ado(np.where(first > 0, natural, 0), AdoConfig())
    if name == "loss":
        return LossProportional(first)
    return make_rule(name, first, str(spec.path))


def tokens_of_domains(result: Result, pairs: Sequence[str]) -> np.ndarray:
    """Tokens of each domain, int64 [K]."""
    tokens = np.zeros(len(result.domains), dtype=np.int64)
    columns = [result.column(name) for name in ("domain", "file", "begin", "end")]
    for number, prefix in enumerate(pairs):
        ends = np.concatenate([[0], np.cumsum(IndexedTokens(prefix).document_tokens)])
        here = columns[1] == number
        domain, begin, end = (column[here] for column in (columns[0], columns[2], columns[3]))
        np.add.at(tokens, domain, ends[end] - ends[begin])
    return tokens


def _tokens_of(
    file: SourceFile, spec: Spec, folder: Path, quiet: bool, samples: tuple[np.ndarray, np.ndarray] | None
) -> str:
    """The prefix of the pair that holds a file's documents; text is tokenised, once. ValueError for a file
    that is not as it was registered. `samples`: (begin, size) of those of a tar."""
    path = file.unchanged()
    if path.suffix == ".bin":
        return str(path.with_suffix(""))
    tokenizer = spec.told.get("tokenizer")
    if tokenizer is None:
        raise ValueError(f"{spec.path}: no tokenizer, and {path} is text; add tokenizer: gpt2, or a folder")
    made_from = [file.path, file.n_bytes, file.mtime_ns, file.text_key, str(tokenizer)]
    made_of = json.dumps(made_from + ([] if file.sha256 is None else [file.sha256]))
    name = f"{path.name.partition('.')[0]}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    made = folder / TOKENS / f"{name}_{file.text_key}_document"
    if not made.with_name(made.name + ".json").is_file():
        log.info("tokenising %s", path)
        made.parent.mkdir(parents=True, exist_ok=True)
        options = Options(
            keys=(file.text_key,), append_eod=True, skip_bad_lines=True, quiet=quiet, overwrite=True
        )
        if samples is None:
            preprocess([str(path)], made.with_name(name), str(tokenizer), options)
        else:
            lines = made.with_name(f"{name}.jsonl")
            places = zip(*map(np.ndarray.tolist, samples), strict=True)
            write_texts(file.plain(folder), places, file.text_key, lines)
            preprocess([str(lines)], made.with_name(name), str(tokenizer), options)
            lines.unlink()
    n = IndexedTokens(made).n_documents
    if n != file.n_documents:
        raise ValueError(
            f"{path}: {file.n_documents:,} documents are registered, {n:,} tokenised; mend the lines that "
            "tools/register_corpus.py CATALOG broken lists, and register it again"
        )
    return str(made)


def _one_tokenizer(pairs: Sequence[str]) -> dict[str, Any]:
    """What the pairs were made with. ValueError where that differs."""
    known: dict[str, Any] = {}
    for prefix in pairs:
        told = read_sidecar(prefix).get("tokenizer") or {}
        if known and told.get("sha256") != known.get("sha256"):
            raise ValueError(f"{prefix}: made with another tokenizer than {pairs[0]}; tokenise them alike")
        known = known or told
    for warning in compare_eods(pairs, allow_mixed=True):
        log.warning("%s", warning)
    return known


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with wait_for_lock(folder / ".lock"):
        yield


def _listed(told: Any) -> list[Any]:
    if told is None:
        return []
    return list(told) if isinstance(told, list | tuple) else [told]
