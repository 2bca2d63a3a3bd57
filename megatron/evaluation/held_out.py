"""Held-out losses of checkpoints, kept beside them, so that a second call scores only what is missing."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron.checkpoint.convert import read_any
from megatron.checkpoint.weights import Weights
from megatron.config.datapaths import Corpus, read_corpora
from megatron.data.documents import write_parquet
from megatron.data.indexed import IndexedTokens
from megatron.evaluation.corpus_loss import (
    CorpusLoss,
    autoregressive_loss,
    bound_loss,
    left_to_right_loss,
    text_bytes,
)
from megatron.evaluation.scores import Scored, fingerprint, identity
from megatron.evaluation.trained_length import warn_past_trained
from megatron.log import get_logger
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.reduce import any_rank, wait_for_all
from megatron.parallel.world import World
from megatron.run_dir import TENSORBOARD, read_json, write_json
from megatron.tokenizer.kinds import Tokenizer, load_by_name
from megatron.tokenizer.vocabulary import VocabularyRows

log = get_logger(__name__)

KIND = "validation"
RATE_MIN = 1e-3  # of a model whose run does not say
FIGURES = ("loss", "perplexity", "bits_per_token", "bits_per_byte")  # that TensorBoard gets


@dataclass(frozen=True, kw_only=True)
class Held:
    """What is scored, and how.

    data     prefix of a .bin/.idx pair, or a data-path file of several
    method   ar: exact; mc: masked diffusion's bound. None: what the objective has
    stride   autoregressive: tokens between two windows; None: seq_len
    seq_len  positions of a window; None: as trained
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
        seq_len = self.seq_len or weights.seq_len
        if seq_len is None:
            raise ValueError(f"{weights.source}: does not say how many positions it reads; give --seq-len")
        room = weights.config.n_positions if weights.config.positions == "learned" else None
        if room is not None and seq_len > room:
            raise ValueError(f"--seq-len: {seq_len} positions, {weights.source} has learned {room}")
        told = {**asdict(self), "method": method, "seq_len": seq_len}
        told["stride"] = (self.stride or seq_len) if causal else None
        told["num_mc"] = self.num_mc if method == "mc" else 1
        return Held(**told)

    @property
    def label(self) -> str:
        """A file's name for this data and this way of scoring."""
        words = [Path(self.data).stem, self.method if self.method != "mc" else f"mc{self.num_mc}"]
        words += [] if self.stride in (None, self.seq_len) else [f"stride{self.stride}"]
        words += [] if self.max_samples is None else [f"first{self.max_samples}"]
        return "-".join(str(word) for word in words)


def score_held_out(
    model: Scored, held: Held, world: World, *, tokenizer: str | None = None, out: Path | None = None
) -> tuple[dict[str, Any], Path, bool]:
    """(what was found, the file it is in, whether it had been found before).

    tokenizer   for bytes of text, instead of what corpus and model say; where none was to be had before
                and one is now, the model is scored again

    Raises ValueError or FileNotFoundError; then nothing is written.
    """
    weights = read_any(model.path, tokenizer=tokenizer)
    held = held.resolved(weights)
    corpora = read_corpora(held.data)
    folder = out or model.folder(KIND)
    path = folder / f"{held.label}.json"
    told = {key: value for key, value in asdict(held).items() if key not in ("batch_size", "per_document")}
    pairs = [[corpus.prefix, fingerprint(Path(f"{corpus.prefix}.bin"))] for corpus in corpora]
    assert held.seq_len is not None, "resolved"
    warnings = warn_past_trained(weights, held.seq_len, "--seq-len")
    for warning in warnings if world.is_first else ():
        log.warning("%s", warning)
    settings = identity([told, fingerprint(model.path), pairs, *warnings])
    before = read_json(path)
    documents = path.with_suffix(".documents.parquet")
    opened = {corpus: IndexedTokens(corpus.prefix) for corpus in corpora}
    same = before is not None and before.get("settings") == settings
    known = same and (documents.is_file() or not held.per_document)
    tokenizers: dict[Corpus, Tokenizer | None] = {}
    if not known or before is None or before.get("bits_per_byte") is None:
        tokenizers = {one: _tokenizer(tokens, weights, tokenizer, world) for one, tokens in opened.items()}
        known = known and None in tokenizers.values()  # else there is more to tell than then
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
        **told,
        **_figures(losses),
        "warnings": warnings,
        "settings": settings,
    }
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        if held.per_document:
            write_parquet(documents, _documents(losses))
        elif not same:
            documents.unlink(missing_ok=True)  # they belong to the figures that are replaced now
        write_json(path, found)
        if out is None:  # the run's folder is left alone where results go elsewhere
            _to_tensorboard(model, held, found)
    return found, path, False


def _score(
    net: Any, weights: Weights, held: Held, corpus: IndexedTokens, tokenizer: Tokenizer | None, world: World
) -> CorpusLoss:
    told = (corpus.sidecar or {}).get("tokenizer") or {}
    if told.get("n_tokens", 0) > weights.config.n_tokens:
        raise ValueError(
            f"{corpus.prefix}: has ids up to {told['n_tokens'] - 1}, {weights.source} knows "
            f"{weights.config.n_tokens}; preprocess with the model's tokenizer"
        )
    assert held.seq_len is not None and held.method is not None, "resolved"
    corpus.n_ids = weights.config.n_tokens
    with _bar(corpus, held, world) as bar:
        asked: dict[str, Any] = {
            "seq_len": held.seq_len,
            "batch_size": held.batch_size,
            "max_samples": held.max_samples,
            "world": world,
            "progress": bar.update,
        }
        if weights.objective == "autoregressive":
            loss = autoregressive_loss(net, corpus, stride=held.stride or held.seq_len, **asked)
        elif held.method == "ar":
            loss = left_to_right_loss(net, corpus, **asked)
        else:
            mask_id = VocabularyRows(weights.config.n_tokens).mask_id
            objective = MaskedDiffusion(mask_id, weights.rate_min or RATE_MIN, held.seed)
            loss = bound_loss(net, objective, corpus, num_mc=held.num_mc, **asked)
    if tokenizer is None:
        return loss
    begin = 1 if weights.objective == "autoregressive" else 0  # the first token is not predicted
    end = begin + int(loss.tokens.sum())
    return CorpusLoss(loss.nats, loss.tokens, loss.draws, text_bytes(corpus, tokenizer, begin, end, world))


@contextmanager
def _bar(corpus: IndexedTokens, held: Held, world: World) -> Iterator[tqdm]:
    name, length = Path(corpus.prefix).name, held.seq_len or 1
    after_first = max(0, corpus.n_tokens - length - (held.stride is not None))
    windows = min(1 + math.ceil(after_first / (held.stride or length)), held.max_samples or math.inf)
    total = int(windows) * held.num_mc
    with tqdm(total=total, desc=name, disable=None if world.is_first else True, mininterval=0.5) as bar:
        yield bar


def _tokenizer(corpus: IndexedTokens, weights: Weights, asked: str | None, world: World) -> Tokenizer | None:
    """To count bytes with: as asked, or what corpus or model say; None, told, where a rank has none.

    Raises ValueError or FileNotFoundError where the one asked for is not to be had.
    """
    if asked is not None:
        return load_by_name(asked)
    named = [((corpus.sidecar or {}).get("tokenizer") or {}).get("name"), weights.tokenizer]
    why, found = "neither corpus nor model names a tokenizer", None
    for name in (name for name in named if name):
        try:
            found = load_by_name(name)
            break
        except (OSError, ValueError) as error:
            why = str(error)
    if not any_rank(found is None, world):  # they count together, or not at all
        return found
    why = why if found is None else f"a rank has no {found.name}"
    if world.is_first:
        log.warning("no bits per byte: %s; --tokenizer names one", why)
    return None


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


def _to_tensorboard(model: Scored, held: Held, found: dict[str, Any]) -> None:
    """Scalars at the checkpoint's step, beside those of training."""
    if model.run is None or model.step is None:
        return
    from torch.utils.tensorboard import SummaryWriter  # imports slowly

    writer = SummaryWriter(str(model.run / TENSORBOARD))
    for domain, told in {"": found, **found.get("domains", {})}.items():
        for name in FIGURES:
            if told[name] is not None:
                place = "/".join(word for word in (held.label, domain, name) if word)
                writer.add_scalar(place, told[name], model.step)
    writer.close()
