"""The loss of a whole held-out corpus, document by document.

autoregressive   windows of seq_len tokens, a new one every `stride`; a window scores what the one before has
                 not, so that every token but the corpus's first is scored once, and with a smaller stride on
                 a longer context: at least seq_len - stride tokens after the first window
masked diffusion windows of seq_len tokens end to end, and the rest; each scored under num_mc masks (the bound
                 that training validates with, the same masks too), or token after token from the left, which
                 is exact and costs a forward for each token
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from megatron.data.indexed import IndexedTokens
from megatron.evaluation.likelihood import Progress, Request
from megatron.evaluation.likelihood_diffusion import tokens_left_to_right
from megatron.model.gpt import Gpt
from megatron.objective.linear_cross_entropy import linear_nll
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.world import World
from megatron.tokenizer.kinds import Tokenizer


@dataclass(frozen=True)
class CorpusLoss:
    """Nats and tokens of each document; nats of a bound are the mean over its masks.

    nats    float64 [n_documents]
    tokens  int64 [n_documents]    scored ones
    draws   float64 [num_mc]       nats of the whole corpus under each draw; None where the loss is exact
    n_bytes                        of the text that was scored, None where no tokenizer is known
    """

    nats: np.ndarray
    tokens: np.ndarray
    draws: np.ndarray | None
    n_bytes: int | None

    def told(self) -> dict[str, float | int | None]:
        """The figures.

        loss_se: over documents, another text of the same kind; mc_se: over masks. mc_interval: of 95 % for
        the bound of this text under all masks, by Student's t of the draws, which are independent.
        """
        total, n = float(self.nats.sum()), int(self.tokens.sum())
        loss, scored = total / n, int((self.tokens > 0).sum())
        loss_se = mc_se = interval = None
        if scored > 1:
            spread = float(((self.nats - loss * self.tokens) ** 2).sum())
            loss_se = math.sqrt(spread * scored / (scored - 1)) / n
        if self.draws is not None and len(self.draws) > 1:
            mc_se = float(self.draws.std(ddof=1)) / math.sqrt(len(self.draws)) / n
            reach = _t_quantile(len(self.draws) - 1) * mc_se
            interval = [loss - reach, loss + reach]
        return {
            "loss": loss,
            "loss_se": loss_se,
            "mc_se": mc_se,
            "mc_interval": interval,
            "bits_per_token": loss / math.log(2),
            "bits_per_byte": None if not self.n_bytes else total / math.log(2) / self.n_bytes,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "n_tokens": n,
            "n_documents": scored,
            "n_bytes": self.n_bytes,
        }


def _t_quantile(freedom: int) -> float:
    """97.5 % of Student's t, so that an interval from two draws is as honest as one from many."""
    from scipy.stats import t  # imports slowly

    return float(t.ppf(0.975, freedom))


@dataclass(frozen=True)
class _Window:
    """Tokens begin..end are read, those from `scored` on are scored; `number` keys the noise."""

    number: int
    begin: int
    scored: int
    end: int


def autoregressive_loss(
    model: Gpt,
    corpus: IndexedTokens,
    *,
    seq_len: int,
    stride: int,
    batch_size: int,
    world: World,
    max_samples: int | None = None,
    progress: Progress = lambda n: None,
) -> CorpusLoss:
    """Exact. ValueError for a stride that leaves tokens out, or a corpus of less than two tokens."""
    if not 1 <= stride <= seq_len:
        raise ValueError(f"--stride: found {stride}, wanted 1 to {seq_len}, the positions of a window")
    windows = list(_strided(corpus, seq_len, stride))[:max_samples]
    sums = _Sums(corpus)
    device = model.embedding.weight.device
    for batch in _mine(windows, batch_size, world, progress):
        read = np.stack([_read(corpus, window) for window in batch])
        inputs = torch.from_numpy(read[:, :-1].copy()).to(device)
        with torch.inference_mode():
            hidden = model.hidden(inputs, causal=True)
            for states, window, ids in zip(hidden, batch, read, strict=True):
                n = window.end - window.scored
                targets = torch.from_numpy(ids[-n:].copy()).to(device)
                nll = linear_nll(states[-n:], model.head_weight, targets)
                sums.add(np.arange(window.scored, window.end), nll.double().cpu().numpy())
    return sums.reduced(world, windows)


def bound_loss(
    model: Gpt,
    objective: MaskedDiffusion,
    corpus: IndexedTokens,
    *,
    seq_len: int,
    num_mc: int,
    batch_size: int,
    world: World,
    max_samples: int | None = None,
    progress: Progress = lambda n: None,
) -> CorpusLoss:
    """The bound by `num_mc` masks for each window; a batch holds windows under several masks."""
    if num_mc < 1:
        raise ValueError(f"--num-mc: found {num_mc}, wanted 1 or more")
    windows = list(_end_to_end(corpus, seq_len))[:max_samples]
    sums = _Sums(corpus, num_mc)
    device = model.embedding.weight.device
    rows = [(window, draw) for window in windows for draw in range(num_mc)]
    for batch in _mine(rows, batch_size, world, progress):
        width = batch[0][0].end - batch[0][0].begin
        inputs, places, targets, scales, of = [], [], [], [], []
        for b, (window, draw) in enumerate(batch):
            ids = _read(corpus, window)[None]
            # the objective leaves out a sample's last token, which is there for the other objective
            task = objective.corrupt(np.pad(ids, ((0, 0), (0, 1))), np.array([window.number]), draw)
            assert task.positions is not None and task.scale is not None, "hidden tokens alone are scored"
            inputs.append(task.inputs)
            places.append(task.positions + b * width)
            targets.append(task.targets)
            scales.append(task.scale)
            of += [b] * len(task.positions)
        with torch.inference_mode():
            states = model.hidden(torch.cat(inputs).to(device), causal=False).flatten(0, 1)
            chosen = states.index_select(0, torch.cat(places).to(device))
            nll = linear_nll(chosen, model.head_weight, torch.cat(targets).to(device)) if of else chosen[:, 0]
        nats = nll.double().cpu().numpy() * torch.cat(scales).double().numpy()
        begins = np.array([window.begin for window, _ in batch])
        rows_of = np.array(of, dtype=np.int64)
        sums.add(begins[rows_of] + torch.cat(places).numpy() % width, nats, [d for _, d in batch], rows_of)
    return sums.reduced(world, windows)


def left_to_right_loss(
    model: Gpt,
    corpus: IndexedTokens,
    *,
    seq_len: int,
    batch_size: int,
    world: World,
    max_samples: int | None = None,
    progress: Progress = lambda n: None,
) -> CorpusLoss:
    """Exact for a diffusion model that writes from the left: a forward for every token."""
    windows = list(_end_to_end(corpus, seq_len))[:max_samples]
    requests = [Request((), tuple(_read(corpus, window).tolist())) for window in windows]
    log_p, _ = tokens_left_to_right(
        model, requests, batch_size=batch_size, max_length=seq_len + 1, world=world, progress=progress
    )
    sums = _Sums(corpus)
    if world.is_first:  # all ranks have all of it already
        sums.add(np.concatenate([np.arange(window.begin, window.end) for window in windows]), -log_p)
    return sums.reduced(world, windows)


def text_bytes(corpus: IndexedTokens, tokenizer: Tokenizer, begin: int, end: int, world: World) -> int:
    """UTF-8 bytes of the text of tokens begin..end, without the ends of documents; shared by all ranks."""
    ends = np.cumsum(corpus.document_tokens)
    last = int(np.searchsorted(ends, end - 1, side="right")) + 1
    n_bytes = 0
    for i in range(world.rank, last, world.n_ranks):
        first = int(ends[i]) - int(corpus.document_tokens[i])
        ids = corpus.document(i)[max(0, begin - first) : max(0, end - first)].tolist()
        n_bytes += len(tokenizer.decode([token for token in ids if token != tokenizer.eod_id]).encode())
    return int(sum_over_ranks(torch.tensor(n_bytes, device=world.device), world))


Row = TypeVar("Row", _Window, tuple[_Window, int])


class _Sums:
    """Nats of each document and of each draw, added up window after window."""

    def __init__(self, corpus: IndexedTokens, num_mc: int | None = None) -> None:
        self.ends = np.cumsum(corpus.document_tokens)
        self.nats = np.zeros(len(self.ends))
        self.draws = None if num_mc is None else np.zeros(num_mc)

    def _documents(self, places: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.ends, places, side="right")

    def add(
        self,
        places: np.ndarray,
        nats: np.ndarray,
        draws: Sequence[int] = (),
        rows: np.ndarray | None = None,
    ) -> None:
        """`nats` of the tokens at `places` of the corpus; those of row r under draw draws[r]."""
        self.nats += np.bincount(self._documents(places), nats, len(self.nats))
        if self.draws is not None and rows is not None:
            self.draws += np.bincount(np.array(draws)[rows], nats, len(self.draws))

    def reduced(self, world: World, windows: Sequence[_Window]) -> CorpusLoss:
        """Over all ranks; tokens are those that `windows` score."""
        tokens = np.zeros(len(self.ends), dtype=np.int64)
        first, last = windows[0].scored, windows[-1].end
        edges = np.clip(np.concatenate([[0], self.ends]), first, last)
        tokens[:] = np.diff(edges)
        nats = sum_over_ranks(torch.from_numpy(self.nats).to(world.device), world).cpu().numpy()
        if self.draws is None:
            return CorpusLoss(nats, tokens, None, None)
        draws = sum_over_ranks(torch.from_numpy(self.draws).to(world.device), world).cpu().numpy()
        return CorpusLoss(nats / len(draws), tokens, draws, None)


def _strided(corpus: IndexedTokens, seq_len: int, stride: int) -> Iterator[_Window]:
    """Windows whose last tokens are predicted; the last window ends with the corpus, on a full context."""
    n = corpus.n_tokens
    if n < 2:
        raise ValueError(f"{corpus.prefix}: {n} tokens, of which none can be predicted")
    number, scored = 0, 1
    end = min(seq_len + 1, n)
    while True:
        yield _Window(number, max(0, end - seq_len - 1), scored, end)
        if end == n:
            return
        number, scored, end = number + 1, end, min(end + stride, n)


def _end_to_end(corpus: IndexedTokens, seq_len: int) -> Iterator[_Window]:
    if not corpus.n_tokens:
        raise ValueError(f"{corpus.prefix}: holds no token")
    for number, begin in enumerate(range(0, corpus.n_tokens, seq_len)):
        yield _Window(number, begin, begin, min(begin + seq_len, corpus.n_tokens))


def _read(corpus: IndexedTokens, window: _Window) -> np.ndarray:
    """int64 [end - begin]."""
    return corpus.read(0, window.begin, window.end - window.begin).astype(np.int64)


def _mine(rows: Sequence[Row], batch_size: int, world: World, progress: Progress) -> Iterator[list[Row]]:
    """This rank's batches of rows of one length; batches are the same whatever the number of ranks."""
    begin, turn = 0, 0
    while begin < len(rows):
        end = begin + 1
        while end < min(len(rows), begin + batch_size) and _length(rows[end]) == _length(rows[begin]):
            end += 1
        if turn % world.n_ranks == world.rank:
            yield list(rows[begin:end])
        progress(end - begin)
        begin, turn = end, turn + 1


def _length(row: _Window | tuple[_Window, int]) -> int:
    window = row[0] if isinstance(row, tuple) else row
    return window.end - window.begin
