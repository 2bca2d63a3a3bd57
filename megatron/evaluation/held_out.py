"""Held-out losses of checkpoints, stored next to them, so that a second call scores only missing ones."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.model_weights import Weights
from megatron.cli import ProgressBar
from megatron.data import open_dataset
from megatron.data.indexed import IndexedTokens
from megatron.data.sidecar import load_sidecar, locate_dataset
from megatron.evaluation import corpus_loss, corpus_tokenizer
from megatron.evaluation.corpus_loss import CorpusLoss
from megatron.evaluation.scored_models import ScoredModel, compute_fingerprint, hash_json, read_weights
from megatron.generation.nonfinite_scores import CAUSE, NonFiniteError
from megatron.generation.trained_length import check_trained_length
from megatron.io import atomic_path, read_json, write_json
from megatron.log import get_logger
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.collectives import barrier
from megatron.parallel.world import World
from megatron.plan.datapaths import SUFFIX, WeightedCorpus, read_held_out_corpora
from megatron.plan.run_dir import TENSORBOARD
from megatron.tokenizer.kinds import Tokenizer

log = get_logger(__name__)

KIND = "validation"
VERSION = 2  # version of the metrics' definitions; part of the file name's hash
RATE_MIN = 1e-3  # for a model without a recorded rate_min; no score depends on it
BITS_PER_BYTE = "nats of scored tokens without end-of-document tokens / ln 2 / UTF-8 bytes of their text"
DOCUMENTS = ".documents.parquet"
FIGURES = ("loss", "perplexity", "bits_per_token", "bits_per_byte")  # metrics logged to TensorBoard


@dataclass(frozen=True, kw_only=True)
class HeldOutScoring:
    """Settings of a held-out score.

    data     prefix of a .bin/.idx dataset, or a data-path file of several
    method   ar: exact; mc: masked diffusion's bound. None: the objective's default
    stride   autoregressive: tokens between two windows; None: seq_len
    seq_len  positions of a window; None: as in training
    windows  corpus: across document ends; document: each document alone (windows.py)
    allow_other_tokenizer   score a corpus even if its tokenizer is not the model's
    batch_size  windows per forward pass
    dtype       of weights and activations
    """

    data: str
    method: str | None = None
    num_mc: int = 8
    stride: int | None = None
    seq_len: int | None = None
    seed: int | None = 0
    batch_size: int = 16
    max_samples: int | None = None
    per_document: bool = False
    windows: str = "corpus"
    allow_other_tokenizer: bool = False
    dtype: str = "float32"

    def resolve(self, weights: Weights) -> "HeldOutScoring":
        """Return a copy with all defaults resolved. Raises ValueError if they do not apply to the model."""
        causal = weights.objective == "autoregressive"
        method = self.method or ("ar" if causal else "mc")
        if causal and method == "mc":
            raise ValueError(f"{weights.source}: autoregressive, so its loss is exact. Omit --method mc.")
        if not causal and self.stride is not None:
            raise ValueError(f"{weights.source}: --stride applies to autoregressive models only. Omit it.")
        seq_len = self.seq_len or weights.seq_len
        if seq_len is None:
            raise ValueError(f"{weights.source}: its sequence length is unknown. Give --seq-len.")
        room = weights.config.n_positions if weights.config.positions == "learned" else None
        if room is not None and seq_len > room:
            raise ValueError(
                f"--seq-len: got {seq_len}, expected at most the {room} positions of {weights.source}"
            )
        stride = (self.stride or seq_len) if causal else None
        if method == "mc":
            return replace(self, method=method, seq_len=seq_len, stride=stride)
        # no random numbers are used
        return replace(self, method=method, seq_len=seq_len, stride=stride, num_mc=1, seed=None)

    def settings(self) -> dict[str, Any]:
        """Return the settings that affect a score, except data and model."""
        without = ("data", "batch_size", "per_document", "allow_other_tokenizer")
        fields = {key: value for key, value in asdict(self).items() if key not in without}
        if self.dtype == "float32":
            del fields["dtype"]  # results from before this option have no such key, and are still valid
        return {**fields, "version": VERSION}

    def label(self, corpora: Sequence[WeightedCorpus]) -> str:
        """Return a file name: data, scoring method, and a hash of all settings that affect a score."""
        name = Path(self.data).name.removesuffix(SUFFIX)
        words = [name, self.method if self.method != "mc" else f"mc{self.num_mc}"]
        words += ["documents"] if self.windows == "document" else []
        words += [] if self.stride in (None, self.seq_len) else [f"stride{self.stride}"]
        words += [] if self.max_samples is None else [f"first{self.max_samples}"]
        content = []
        for corpus in corpora:
            identity = _identify_corpus(corpus)
            name = Path(corpus.prefix).name
            content.append([name, str(corpus.weight), identity["sums"], *identity["bytes"]])
        words.append(hash_json([self.settings(), content])[:8])
        return "-".join(str(word) for word in words)


def _identify_corpus(corpus: WeightedCorpus) -> dict[str, Any]:
    """Identify a corpus, wherever it is: the checksums of its sidecar, else its path; and its sizes."""
    files = locate_dataset(corpus.prefix)
    sums = (load_sidecar(corpus.prefix) or {}).get("sha256")
    # a dataset of parts has the sizes of the merged dataset
    return {"sums": sums or files.location, "bytes": [files.count_bytes(), files.index.stat().st_size]}


def score_held_out(
    model: ScoredModel,
    scoring: HeldOutScoring,
    world: World,
    *,
    tokenizer: str | None = None,
    out: Path | None = None,
) -> tuple[dict[str, Any], Path, bool]:
    """Score a model, or reuse a stored score. Return (result, its file, True if it was reused).

    tokenizer   for counting text bytes, instead of the tokenizer of corpus
                or model. The model is scored again if the stored score
                had no tokenizer and there is one now, or if it changed.

    Raises ValueError or FileNotFoundError, and NonFiniteError for a
    loss that is NaN or Inf. In these cases nothing is written.
    """
    weights = read_weights(model, tokenizer)
    scoring = scoring.resolve(weights)
    corpora = read_held_out_corpora(scoring.data)
    opened = {corpus: open_dataset(corpus.prefix) for corpus in corpora}
    mismatched = corpus_tokenizer.find_mismatches(opened, weights, scoring.allow_other_tokenizer, world)
    label = scoring.label(corpora)
    folder = out or model.folder(KIND)
    path = folder / f"{label}.json"
    fingerprints = [
        [Path(corpus.prefix).name, hash_json(locate_dataset(corpus.prefix).version())] for corpus in corpora
    ]
    assert scoring.seq_len is not None, "resolved"
    warnings = check_trained_length(weights, scoring.seq_len, "--seq-len")
    for warning in warnings if world.is_first else ():
        log.warning("%s", warning)
    settings = hash_json([scoring.settings(), compute_fingerprint(model.path), fingerprints, *warnings])
    previous = read_json(path)
    same = previous is not None and previous.get("settings") == settings
    is_current = same and (path.with_suffix(DOCUMENTS).is_file() or not scoring.per_document)
    has_bytes = is_current and previous is not None and previous.get("bits_per_byte") is not None
    tokenizers = {
        corpus: corpus_tokenizer.load_byte_tokenizer(tokens, weights, tokenizer, world, warn=not has_bytes)
        for corpus, tokens in opened.items()
    }
    # If no tokenizer can be loaded now, the stored score is at
    # least as good: a machine without the tokenizer must not
    # replace it by a score without bits per byte.
    sums = [None if item is None else item.sha256 for item in tokenizers.values()]
    is_current &= previous is not None and (None in sums or sums == previous.get("tokenizers"))
    barrier(world)  # no rank may write before all have checked which files exist
    if is_current and previous is not None:
        return previous, path, True
    losses = {}
    net = weights.build_model().to(world.device, getattr(torch, scoring.dtype))
    for corpus, tokens in opened.items():
        losses[corpus] = _score_corpus(net, weights, scoring, tokens, tokenizers[corpus], world)
    result = {
        "checkpoint": str(model.path) if model.hub_name is None else model.hub_name,
        "step": model.step,
        "objective": weights.objective,
        "data": scoring.data,
        **scoring.settings(),
        **_summarize_losses(losses),
        "bits_per_byte_of": BITS_PER_BYTE,
        "corpora": [
            {"prefix": str(Path(corpus.prefix).resolve()), "weight": float(corpus.weight)}
            | _identify_corpus(corpus)
            for corpus in corpora
        ],
        "tokenizers": sums,
        **({"other_tokenizer": mismatched} if mismatched else {}),
        "warnings": warnings,
        "settings": settings,
    }
    if world.is_first:
        if previous is not None and not same:
            log.warning("%s: replaced; it was of other weights or data under the same names", path)
        _write_results(path, result, losses, scoring, keep=same)
        if out is None:  # with --out, the run folder stays unchanged
            _log_to_tensorboard(model, label, result)
    return result, path, False


def _write_results(
    path: Path,
    result: dict[str, Any],
    losses: dict[WeightedCorpus, CorpusLoss],
    scoring: HeldOutScoring,
    keep: bool,
) -> None:
    """Write the result and the per-document losses; `keep`: an existing document file is still valid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = path.with_suffix(DOCUMENTS)
    if not keep:
        # an old result beside new documents would describe
        # other text, if this process were killed in between
        path.unlink(missing_ok=True)
        documents.unlink(missing_ok=True)
    if scoring.per_document:
        with atomic_path(documents) as partial:
            _build_document_table(losses).to_parquet(partial, index=False)
    # last: the result marks the per-document file as
    # complete, so a process killed in between scores again
    write_json(path, result)


def _score_corpus(
    net: Any,
    weights: Weights,
    scoring: HeldOutScoring,
    corpus: IndexedTokens,
    tokenizer: Tokenizer | None,
    world: World,
) -> CorpusLoss:
    assert scoring.seq_len is not None and scoring.method is not None, "resolved"
    corpus.n_ids = weights.config.n_tokens
    causal = weights.objective == "autoregressive"
    eod_id = corpus_tokenizer.get_sidecar_tokenizer(corpus).get("eod_id")
    if eod_id is None and tokenizer is not None:
        eod_id = tokenizer.eod_id
    text = (
        None if scoring.windows == "corpus" else corpus_tokenizer.resolve_text_ids(corpus, eod_id, tokenizer)
    )
    windows = corpus_loss.select_windows(
        corpus, causal, scoring.seq_len, scoring.stride, scoring.max_samples, text
    )
    with ProgressBar(Path(corpus.prefix).name, len(windows), "windows", quiet=not world.is_first) as bar:
        options: dict[str, Any] = {"batch_size": scoring.batch_size, "world": world, "progress": bar.update}
        scorer = corpus_loss.CorpusScorer(net, corpus, windows, eod_id, **options)
        if causal:
            loss = scorer.score_autoregressive()
        elif scoring.method == "ar":
            loss = scorer.score_left_to_right()
        else:
            rate_min, seed = weights.rate_min or RATE_MIN, scoring.seed or 0
            objective = MaskedDiffusion(weights.config.mask_row, rate_min, seed)
            loss = scorer.score_bound(objective, scoring.num_mc)
    if len(bad := np.flatnonzero(~np.isfinite(loss.nats))):
        raise NonFiniteError(
            f"{weights.source}: got a loss of {loss.nats[bad[0]]} for document {bad[0]} of {corpus.prefix}, "
            f"expected a finite number; {CAUSE}. No result is written."
        )
    if tokenizer is None:
        return loss
    assert eod_id is not None, "tokenizer.eod_id raises if it is missing"
    n_bytes, n_eod = corpus_loss.count_text_bytes(
        corpus, tokenizer, windows[0].scored, loss.tokens, eod_id, world
    )
    return replace(loss, n_bytes=n_bytes, n_eod=n_eod)


def _summarize_losses(losses: dict[WeightedCorpus, CorpusLoss]) -> dict[str, Any]:
    """Return metrics over all tokens and, for several corpora, per domain and averaged by weight."""
    domains = {}
    for corpus, loss in losses.items():
        domains[_get_domain_name(corpus, losses)] = {"weight": float(corpus.weight), **loss.metrics()}
    n_bytes = [loss.n_bytes for loss in losses.values() if loss.n_bytes is not None]
    draws = [loss.draws for loss in losses.values() if loss.draws is not None]
    # nats of draw m of all corpora are the sums over corpora
    whole = CorpusLoss(
        np.concatenate([loss.nats for loss in losses.values()]),
        np.concatenate([loss.tokens for loss in losses.values()]),
        np.sum(draws, axis=0) if draws else None,
        sum(n_bytes) if len(n_bytes) == len(losses) else None,
        sum(loss.eod_nats for loss in losses.values()),
        sum(loss.n_eod for loss in losses.values()),
        _add_contexts([loss.contexts for loss in losses.values() if loss.contexts is not None]),
    )
    if len(domains) == 1:
        return whole.metrics()
    weights = np.array([float(corpus.weight) for corpus in losses])
    by_weight = float(weights @ [domain["loss"] for domain in domains.values()] / weights.sum())
    return {**whole.metrics(), "loss_by_weight": by_weight, "domains": domains}


def _add_contexts(parts: list[np.ndarray]) -> np.ndarray | None:
    """Return the sum of the `CorpusLoss.contexts` of several corpora, whose windows may differ in length."""
    if not parts:
        return None
    whole = np.zeros((2, max(part.shape[1] for part in parts)))
    for part in parts:
        whole[:, : part.shape[1]] += part
    return whole


def _get_domain_name(corpus: WeightedCorpus, among: Iterable[WeightedCorpus]) -> str:
    """Return the file name of a dataset, or its whole prefix if several datasets have that name."""
    name = Path(corpus.prefix).name
    return corpus.prefix if sum(Path(other.prefix).name == name for other in among) > 1 else name


def _build_document_table(losses: dict[WeightedCorpus, CorpusLoss]) -> Any:
    """Return a data frame with one row per document."""
    import pandas as pd  # slow to import, and only this option requires it

    tables = [
        pd.DataFrame({"domain": _get_domain_name(corpus, losses), "document": np.arange(len(loss.nats)),
                      "tokens": loss.tokens, "nats": loss.nats})
        for corpus, loss in losses.items()
    ]  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def _log_to_tensorboard(model: ScoredModel, label: str, result: dict[str, Any]) -> None:
    """Log scalars at the checkpoint's step, next to the training scalars."""
    if model.run is None or model.step is None:
        return
    from torch.utils.tensorboard import SummaryWriter  # slow import

    writer = SummaryWriter(str(model.run / TENSORBOARD))
    for domain, metrics in {"": result, **result.get("domains", {})}.items():
        for name in FIGURES:
            if metrics[name] is not None:
                place = "/".join(word for word in (label, domain, name) if word)
                writer.add_scalar(place, metrics[name], model.step)
    writer.close()
