"""Held-out losses of checkpoints, kept beside them, so that a second call scores only what is missing."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.checkpoint.convert import read_any
from megatron.checkpoint.weights import Weights
from megatron.config.choices import WINDOWS
from megatron.config.datapaths import SUFFIX, Corpus, read_corpora, read_sidecar
from megatron.data.documents import write_parquet
from megatron.data.indexed import IndexedTokens
from megatron.evaluation.corpus_loss import (
    CorpusLoss,
    autoregressive_loss,
    bound_loss,
    left_to_right_loss,
    text_bytes,
    windows_of,
)
from megatron.evaluation.corpus_tokenizer import (
    find_other_tokenizers,
    load_byte_tokenizer,
    sidecar_tokenizer,
    text_ids,
)
from megatron.evaluation.nonfinite import CAUSE, NonFiniteError
from megatron.evaluation.scores import Scored, fingerprint, identity
from megatron.evaluation.trained_length import warn_past_trained
from megatron.log import get_logger
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.reduce import wait_for_all
from megatron.parallel.world import World
from megatron.run_dir import TENSORBOARD, read_json, write_json
from megatron.tokenizer.kinds import Tokenizer
from megatron.tokenizer.vocabulary import VocabularyRows

log = get_logger(__name__)

KIND = "validation"
VERSION = 2  # of what the figures mean; it is part of their file's name
RATE_MIN = 1e-3  # of a model whose run does not say; no score depends on it
BITS_PER_BYTE = "nats of scored tokens without end-of-document tokens / ln 2 / UTF-8 bytes of their text"
DOCUMENTS = ".documents.parquet"
FIGURES = ("loss", "perplexity", "bits_per_token", "bits_per_byte")  # that TensorBoard gets


@dataclass(frozen=True, kw_only=True)
class Held:
    """What is scored, and how.

    data     prefix of a .bin/.idx pair, or a data-path file of several
    method   ar: exact; mc: masked diffusion's bound. None: what the objective has
    stride   autoregressive: tokens between two windows; None: seq_len
    seq_len  positions of a window; None: as trained
    windows  corpus: across the ends of documents; document: each document alone (windows.py)
    allow_other_tokenizer   score a corpus of another tokenizer than the model's all the same
    """

    data: str
    method: str | None = None
    num_mc: int = 8
    stride: int | None = None
    seq_len: int | None = None
    seed: int = 0
    batch_size: int = 16
    max_samples: int | None = None
    per_document: bool = False
    windows: str = "corpus"
    allow_other_tokenizer: bool = False

    def resolved(self, weights: Weights) -> "Held":
        """With everything filled in. ValueError where the model has no such score."""
        causal = weights.objective == "autoregressive"
        method = self.method or ("ar" if causal else "mc")
        if causal and method == "mc":
            raise ValueError(f"{weights.source}: autoregressive, its loss is exact; leave --method mc out")
        if not causal and self.stride is not None:
            raise ValueError(f"{weights.source}: --stride is for autoregressive models; leave it out")
        for name in ("batch_size", "max_samples", "seq_len", "stride", "num_mc"):
            if (found := getattr(self, name)) is not None and found < 1:
                raise ValueError(f"--{name.replace('_', '-')}: found {found}, wanted 1 or more")
        if self.windows not in WINDOWS:
            raise ValueError(f"--windows: got {self.windows!r}, expected {' or '.join(WINDOWS)}")
        seq_len = self.seq_len or weights.seq_len
        if seq_len is None:
            raise ValueError(f"{weights.source}: does not say how many positions it reads; give --seq-len")
        room = weights.config.n_positions if weights.config.positions == "learned" else None
        if room is not None and seq_len > room:
            raise ValueError(f"--seq-len: {seq_len} positions, {weights.source} has learned {room}")
        told = {**asdict(self), "method": method, "seq_len": seq_len}
        told["stride"] = (self.stride or seq_len) if causal else None
        told["num_mc"] = self.num_mc if method == "mc" else 1
        told["seed"] = self.seed if method == "mc" else None  # nothing is drawn
        return Held(**told)

    def settings(self) -> dict[str, Any]:
        """What changes a figure, but for the data and the model."""
        without = ("data", "batch_size", "per_document", "allow_other_tokenizer")
        told = {key: value for key, value in asdict(self).items() if key not in without}
        return {**told, "version": VERSION}

    def label(self, corpora: Sequence[Corpus]) -> str:
        """A file's name: the data, the way of scoring, and a hash of all that changes a figure."""
        name = Path(self.data).name.removesuffix(SUFFIX)
        words = [name, self.method if self.method != "mc" else f"mc{self.num_mc}"]
        words += ["documents"] if self.windows == "document" else []
        words += [] if self.stride in (None, self.seq_len) else [f"stride{self.stride}"]
        words += [] if self.max_samples is None else [f"first{self.max_samples}"]
        content = [[Path(one.prefix).name, str(one.weight), *_content(one)] for one in corpora]
        words.append(identity([self.settings(), content])[:8])
        return "-".join(str(word) for word in words)


def _content(corpus: Corpus) -> list[Any]:
    """What a corpus is, wherever it is: the sums of its sidecar, or else its path, and its sizes."""
    files = [Path(f"{corpus.prefix}{end}") for end in (".bin", ".idx")]
    sums = read_sidecar(corpus.prefix).get("sha256") if Path(f"{corpus.prefix}.json").is_file() else None
    return [sums or str(files[0].resolve()), *(file.stat().st_size for file in files)]


def score_held_out(
    model: Scored, held: Held, world: World, *, tokenizer: str | None = None, out: Path | None = None
) -> tuple[dict[str, Any], Path, bool]:
    """(what was found, the file it is in, whether it had been found before).

    tokenizer   for bytes of text, instead of what corpus and model say; where none was to be had before
                and one is now, or it is another than before, the model is scored again

    Raises ValueError or FileNotFoundError, NonFiniteError for a loss that is NaN or Inf; then nothing is
    written.
    """
    weights = read_any(model.path, tokenizer=tokenizer)
    held = held.resolved(weights)
    corpora = read_corpora(held.data)
    opened = {corpus: IndexedTokens(corpus.prefix) for corpus in corpora}
    other = find_other_tokenizers(opened, weights, held.allow_other_tokenizer, world)
    label = held.label(corpora)
    folder = out or model.folder(KIND)
    path = folder / f"{label}.json"
    pairs = [[Path(corpus.prefix).name, fingerprint(Path(f"{corpus.prefix}.bin"))] for corpus in corpora]
    assert held.seq_len is not None, "resolved"
    warnings = warn_past_trained(weights, held.seq_len, "--seq-len")
    for warning in warnings if world.is_first else ():
        log.warning("%s", warning)
    settings = identity([held.settings(), fingerprint(model.path), pairs, *warnings])
    before = read_json(path)
    same = before is not None and before.get("settings") == settings
    known = same and (path.with_suffix(DOCUMENTS).is_file() or not held.per_document)
    tokenizers: dict[Corpus, Tokenizer | None] = {}
    if not known or before is None or before.get("bits_per_byte") is None or tokenizer is not None:
        tokenizers = {
            one: load_byte_tokenizer(tokens, weights, tokenizer, world) for one, tokens in opened.items()
        }
        sums = [None if one is None else one.sha256 for one in tokenizers.values()]
        known = known and before is not None and (None in sums or sums == before.get("tokenizers"))
    wait_for_all(world)  # all ranks have seen the same files before one writes another
    if known and before is not None:
        return before, path, True
    losses = {}
    net = weights.model().to(world.device)
    for corpus, tokens in opened.items():
        losses[corpus] = _score(net, weights, held, tokens, tokenizers[corpus], world)
    found = {
        "checkpoint": str(model.path),
        "step": model.step,
        "objective": weights.objective,
        "data": held.data,
        **held.settings(),
        **_figures(losses),
        "bits_per_byte_of": BITS_PER_BYTE,
        "corpora": [{"prefix": str(Path(one.prefix).resolve()), **_about(one)} for one in corpora],
        "tokenizers": [None if one is None else one.sha256 for one in tokenizers.values()],
        **({"other_tokenizer": other} if other else {}),
        "warnings": warnings,
        "settings": settings,
    }
    if world.is_first:
        if before is not None and not same:
            log.warning("%s: replaced; it was of other weights or files under the same names", path)
        _write(path, found, losses, held, keep=same)
        if out is None:  # the run's folder is left alone where results go elsewhere
            _to_tensorboard(model, label, found)
    return found, path, False


def _about(corpus: Corpus) -> dict[str, Any]:
    content = _content(corpus)
    return {"weight": float(corpus.weight), "sums": content[0], "bytes": content[1:]}


def _write(
    path: Path, found: dict[str, Any], losses: dict[Corpus, CorpusLoss], held: Held, keep: bool
) -> None:
    """The figures, and with them the documents; `keep`: those that are there are of the same figures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = path.with_suffix(DOCUMENTS)
    if held.per_document:
        write_parquet(documents, _documents(losses))
    elif not keep:
        documents.unlink(missing_ok=True)  # they belong to the figures that are replaced now
    write_json(path, found)


def _score(
    net: Any, weights: Weights, held: Held, corpus: IndexedTokens, tokenizer: Tokenizer | None, world: World
) -> CorpusLoss:
    told = sidecar_tokenizer(corpus)
    if told.get("n_tokens", 0) > weights.config.n_tokens:
        raise ValueError(
            f"{corpus.prefix}: has ids up to {told['n_tokens'] - 1}, {weights.source} knows "
            f"{weights.config.n_tokens}; preprocess with the model's tokenizer"
        )
    assert held.seq_len is not None and held.method is not None, "resolved"
    corpus.n_ids = weights.config.n_tokens
    causal = weights.objective == "autoregressive"
    eod_id = told.get("eod_id")
    if eod_id is None and tokenizer is not None:
        eod_id = tokenizer.eod_id
    text = None if held.windows == "corpus" else text_ids(corpus, eod_id, tokenizer)
    windows = windows_of(corpus, causal, held.seq_len, held.stride, held.max_samples, text)
    name, total = Path(corpus.prefix).name, len(windows) * held.num_mc
    with tqdm(total=total, desc=name, disable=None if world.is_first else True, mininterval=0.5) as bar:
        asked: dict[str, Any] = {
            "seq_len": held.seq_len,
            "batch_size": held.batch_size,
            "max_samples": held.max_samples,
            "world": world,
            "progress": bar.update,
            "text": text,
            "eod_id": eod_id,
        }
        if causal:
            loss = autoregressive_loss(net, corpus, stride=held.stride or held.seq_len, **asked)
        elif held.method == "ar":
            loss = left_to_right_loss(net, corpus, **asked)
        else:
            mask_id = VocabularyRows(weights.config.n_tokens).mask_id
            objective = MaskedDiffusion(mask_id, weights.rate_min or RATE_MIN, held.seed)
            loss = bound_loss(net, objective, corpus, num_mc=held.num_mc, **asked)
    if len(bad := np.flatnonzero(~np.isfinite(loss.nats))):
        raise NonFiniteError(
            f"{weights.source}: got a loss of {loss.nats[bad[0]]} for document {bad[0]} of {corpus.prefix}, "
            f"expected a finite number; {CAUSE}. No result is written."
        )
    if tokenizer is None:
        return loss
    n_bytes, n_eod = text_bytes(corpus, tokenizer, windows[0].scored, loss.tokens, eod_id, world)
    return replace(loss, n_bytes=n_bytes, n_eod=n_eod)


def _figures(losses: dict[Corpus, CorpusLoss]) -> dict[str, Any]:
    """Of all tokens together, and of several domains each by itself and the mean by their weights."""
    domains = {}
    for corpus, loss in losses.items():
        domains[_domain(corpus, losses)] = {"weight": float(corpus.weight), **loss.told()}
    known = [loss.n_bytes for loss in losses.values() if loss.n_bytes is not None]
    draws = [loss.draws for loss in losses.values() if loss.draws is not None]
    whole = CorpusLoss(
        np.concatenate([loss.nats for loss in losses.values()]),
        np.concatenate([loss.tokens for loss in losses.values()]),
        np.sum(draws, axis=0) if draws else None,
        sum(known) if len(known) == len(losses) else None,
        sum(loss.eod_nats for loss in losses.values()),
        sum(loss.n_eod for loss in losses.values()),
    )
    if len(domains) == 1:
        return whole.told()
    weights = np.array([float(corpus.weight) for corpus in losses])
    by_weight = float(weights @ [one["loss"] for one in domains.values()] / weights.sum())
    return {**whole.told(), "loss_by_weight": by_weight, "domains": domains}


def _domain(corpus: Corpus, among: Sequence[Corpus] | dict[Corpus, CorpusLoss]) -> str:
    """The name of a pair's file, or its whole prefix where two have one name."""
    name = Path(corpus.prefix).name
    return corpus.prefix if sum(Path(one.prefix).name == name for one in among) > 1 else name


def _documents(losses: dict[Corpus, CorpusLoss]) -> dict[str, np.ndarray | list[str]]:
    """A row a document."""
    return {
        "domain": [_domain(corpus, losses) for corpus, loss in losses.items() for _ in loss.nats],
        "document": np.concatenate([np.arange(len(loss.nats)) for loss in losses.values()]),
        "tokens": np.concatenate([loss.tokens for loss in losses.values()]),
        "nats": np.concatenate([loss.nats for loss in losses.values()]),
    }


def _to_tensorboard(model: Scored, label: str, found: dict[str, Any]) -> None:
    """Scalars at the checkpoint's step, beside those of training."""
    if model.run is None or model.step is None:
        return
    from torch.utils.tensorboard import SummaryWriter  # imports slowly

    writer = SummaryWriter(str(model.run / TENSORBOARD))
    for domain, told in {"": found, **found.get("domains", {})}.items():
        for name in FIGURES:
            if told[name] is not None:
                place = "/".join(word for word in (label, domain, name) if word)
                writer.add_scalar(place, told[name], model.step)
    writer.close()
