"""The loss of a whole held-out corpus, document by document. windows.py has what is read together.

autoregressive   exactly: a window scores what the one before has not, so that every token but a corpus's
                 first is scored once, and with a smaller stride on a longer context: at least seq_len -
                 stride tokens after the first window. Of documents read alone the first is scored too
masked diffusion windows end to end, each scored under num_mc masks (the bound that training validates with,
                 the same masks too), or token after token from the left, which is exact for that order and
                 costs a forward for each token
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from megatron.data.indexed import IndexedTokens
from megatron.evaluation.likelihood import Progress, Request
from megatron.evaluation.likelihood_diffusion import tokens_left_to_right
from megatron.evaluation.windows import (
    TextIds,
    Window,
    batches,
    end_to_end,
    of_documents,
    padded,
    read,
    scored_tokens,
    strided,
)
from megatron.model.gpt import Gpt
from megatron.objective.linear_cross_entropy import linear_nll
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.world import World
from megatron.tokenizer.kinds import Tokenizer


@dataclass(frozen=True)
class CorpusLoss:
    """Nats and tokens of each document; nats of a bound are the mean over its masks.

    nats      float64 [n_documents]
    tokens    int64 [n_documents]    scored ones
    draws     float64 [num_mc]       nats of the whole corpus under each draw; None where the loss is exact
    n_bytes   of the text that was scored, None where no tokenizer is known
    eod_nats  of all nats, those of end-of-document tokens, which are no bytes of text
    n_eod     how many of the tokens are such
    """

    nats: np.ndarray
    tokens: np.ndarray
    draws: np.ndarray | None
    n_bytes: int | None
    eod_nats: float = 0.0
    n_eod: int = 0

    def told(self) -> dict[str, float | int | list[float] | None]:
        """The figures.

        loss, perplexity, bits_per_token: of all scored tokens, end-of-document tokens among them.
        bits_per_byte: the nats of all scored tokens but those, over the UTF-8 bytes of their text.
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
        per_byte = None if not self.n_bytes else (total - self.eod_nats) / math.log(2) / self.n_bytes
        return {
            "loss": loss,
            "loss_se": loss_se,
            "mc_se": mc_se,
            "mc_interval": interval,
            "bits_per_token": loss / math.log(2),
            "bits_per_byte": per_byte,
            "perplexity": math.exp(loss) if loss < 700 else None,  # beyond, no float has it, nor JSON
            "n_tokens": n,
            "n_documents": scored,
            "n_bytes": self.n_bytes,
            "n_eod": self.n_eod,
        }


def _t_quantile(freedom: int) -> float:
    """97.5 % of Student's t, so that an interval from two draws is as honest as one from many."""
    from scipy.stats import t  # imports slowly

    return float(t.ppf(0.975, freedom))


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
    text: TextIds | None = None,
    eod_id: int | None = None,
) -> CorpusLoss:
    """Exact; of documents read alone where their ids are given by `text`.

    ValueError for a stride that leaves tokens out, or a corpus of less than two tokens.
    """
    windows = windows_of(corpus, True, seq_len, stride, max_samples, text)
    sums = _Sums(corpus, eod_id)
    device = model.embedding.weight.device
    for batch in batches(windows, batch_size, world, progress):
        ids, lengths = padded([read(corpus, window) for window in batch])
        inputs = torch.from_numpy(ids[:, :-1].copy()).to(device)
        with torch.inference_mode():
            hidden = model.hidden(inputs, causal=True)  # what is padded is behind all and seen by none
            for states, window, row, length in zip(hidden, batch, ids, lengths, strict=True):
                scored = row[window.n_context : length]
                targets = torch.from_numpy(scored.copy()).to(device)
                nll = linear_nll(states[window.n_context - 1 : length - 1], model.head_weight, targets)
                sums.add(np.arange(window.scored, window.end), nll.double().cpu().numpy(), scored)
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
    text: TextIds | None = None,
    eod_id: int | None = None,
) -> CorpusLoss:
    """The bound by `num_mc` masks for each window; a batch holds windows under several masks.

    Context, which documents read alone have, is seen under every mask: the bound is of what follows it.
    """
    if num_mc < 1:
        raise ValueError(f"--num-mc: found {num_mc}, wanted 1 or more")
    windows = windows_of(corpus, False, seq_len, None, max_samples, text)
    sums = _Sums(corpus, eod_id, num_mc)
    device = model.embedding.weight.device
    rows = [(window, draw) for window in windows for draw in range(num_mc)]
    for batch in batches(rows, batch_size, world, progress):
        inputs, columns, scales, of = [], [], [], []
        for b, (window, draw) in enumerate(batch):
            ids = read(corpus, window)
            context, scored = np.split(ids, [window.n_context])
            # the objective leaves out a sample's last token, which is there for the other objective
            task = objective.corrupt(np.append(scored, 0)[None], np.array([window.number]), draw)
            assert task.positions is not None and task.scale is not None, "hidden tokens alone are scored"
            inputs.append(np.concatenate([context, task.inputs[0].numpy()]))
            columns.append(task.positions.numpy() + window.n_context)
            scales.append(task.scale.double().numpy())
            of += [b] * len(task.positions)
        rows_of, column = np.array(of), np.concatenate(columns)
        # column n_context of a row is the token at `scored`
        at = np.array([window.scored - window.n_context for window, _ in batch])[rows_of] + column
        targets = corpus.tokens[at].astype(np.int64)
        nll = _nll_of_hidden(model, inputs, rows_of, column, targets, device)
        nats = nll * np.concatenate(scales)
        sums.add(at, nats, targets, np.array([draw for _, draw in batch])[rows_of])
    return sums.reduced(world, windows)


@torch.inference_mode()
def _nll_of_hidden(
    model: Gpt,
    inputs: Sequence[np.ndarray],
    row: np.ndarray,
    column: np.ndarray,
    targets: np.ndarray,
    device: torch.device,
) -> np.ndarray:
    """-log p of `targets` [T] at (row, column) of inputs of unlike lengths, seen from both sides: float64."""
    ids, lengths = padded(inputs)
    width, reading = ids.shape[1], {}
    if lengths.min() < width:  # padding would be read too
        there = torch.from_numpy(np.arange(width) < lengths[:, None]).to(device)
        reading["visible"] = there[:, None, :].expand(-1, width, -1)
    states = model.hidden(torch.from_numpy(ids).to(device), causal=False, **reading).flatten(0, 1)
    chosen = states.index_select(0, torch.from_numpy(row * width + column).to(device))
    nll = linear_nll(chosen, model.head_weight, torch.from_numpy(targets).to(device))
    return nll.double().cpu().numpy()


def left_to_right_loss(
    model: Gpt,
    corpus: IndexedTokens,
    *,
    seq_len: int,
    batch_size: int,
    world: World,
    max_samples: int | None = None,
    progress: Progress = lambda n: None,
    text: TextIds | None = None,
    eod_id: int | None = None,
) -> CorpusLoss:
    """Exact for a diffusion model that writes from the left: a forward for every token."""
    windows = windows_of(corpus, False, seq_len, None, max_samples, text)
    requests = []
    for window in windows:
        ids = read(corpus, window).tolist()
        requests.append(Request(tuple(ids[: window.n_context]), tuple(ids[window.n_context :])))
    log_p, _ = tokens_left_to_right(
        model, requests, batch_size=batch_size, max_length=seq_len + 1, world=world, progress=progress
    )
    sums = _Sums(corpus, eod_id)
    if world.is_first:  # all ranks have all of it already
        places = np.concatenate([np.arange(window.scored, window.end) for window in windows])
        sums.add(places, -log_p, np.concatenate([request.continuation for request in requests]))
    return sums.reduced(world, windows)


def windows_of(
    corpus: IndexedTokens,
    causal: bool,
    seq_len: int,
    stride: int | None,
    max_samples: int | None,
    text: TextIds | None,
) -> list[Window]:
    """The windows that are scored. A diffusion model reads what it predicts, so its windows have seq_len ids.

    ValueError for a stride that leaves tokens out, for windows without room for a context, or no tokens.
    """
    stride = seq_len if stride is None else stride
    if not 1 <= stride <= seq_len:
        raise ValueError(f"--stride: found {stride}, wanted 1 to {seq_len}, the positions of a window")
    if text is None:
        found = strided(corpus, seq_len, stride) if causal else end_to_end(corpus, seq_len)
    elif causal:
        found = of_documents(corpus, seq_len + 1, stride, text)
    elif seq_len < 2:
        raise ValueError(f"--seq-len: got {seq_len}, expected 2 or more, of which one is context")
    else:
        found = of_documents(corpus, seq_len, seq_len - 1, text)
    return list(found if max_samples is None else islice(found, max_samples))


def text_bytes(
    corpus: IndexedTokens, tokenizer: Tokenizer, first: int, tokens: np.ndarray, eod_id: int, world: World
) -> tuple[int, int]:
    """(UTF-8 bytes of the text that was scored, its end-of-document tokens, which are no text).

    first    token of the corpus that was scored first
    tokens   how many of each document were, int64 [n_documents]

    Shared by all ranks.
    """
    begins = np.cumsum(corpus.document_tokens) - corpus.document_tokens
    n_bytes = n_eod = 0
    for i in np.flatnonzero(tokens)[world.rank :: world.n_ranks].tolist():
        begin = max(0, first - int(begins[i]))
        ids = corpus.document(i)[begin : begin + int(tokens[i])].tolist()
        words = [token for token in ids if token != eod_id]
        n_eod += len(ids) - len(words)
        n_bytes += len(tokenizer.decode(words).encode())
    found = sum_over_ranks(torch.tensor([n_bytes, n_eod], device=world.device), world)
    return int(found[0]), int(found[1])


class _Sums:
    """Nats of each document, of ends of documents and of each draw, added up window after window."""

    def __init__(self, corpus: IndexedTokens, eod_id: int | None, num_mc: int | None = None) -> None:
        self.corpus, self.eod_id = corpus, eod_id
        self.ends = np.cumsum(corpus.document_tokens)
        self.nats = np.zeros(len(self.ends) + 1)  # the last is of ends of documents
        self.draws = None if num_mc is None else np.zeros(num_mc)

    def add(
        self, places: np.ndarray, nats: np.ndarray, ids: np.ndarray, draws: np.ndarray | None = None
    ) -> None:
        """`nats` of the tokens `ids` at `places` of the corpus, all [T]; under which draw each."""
        of = np.searchsorted(self.ends, places, side="right")
        self.nats[:-1] += np.bincount(of, nats, len(self.ends))
        if self.eod_id is not None:
            self.nats[-1] += nats[ids == self.eod_id].sum()
        if self.draws is not None and draws is not None:
            self.draws += np.bincount(draws, nats, len(self.draws))

    def reduced(self, world: World, windows: Sequence[Window]) -> CorpusLoss:
        """Over all ranks; tokens are those that `windows` score."""
        tokens = scored_tokens(self.corpus, windows)
        nats = sum_over_ranks(torch.from_numpy(self.nats).to(world.device), world).cpu().numpy()
        draws = None
        if self.draws is not None:
            draws = sum_over_ranks(torch.from_numpy(self.draws).to(world.device), world).cpu().numpy()
            nats = nats / len(draws)
        return CorpusLoss(nats[:-1], tokens, draws, None, float(nats[-1]))
