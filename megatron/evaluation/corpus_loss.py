"""Losses of a whole held-out corpus, per document. The windows are defined in windows.py.

autoregressive   exact: a window scores the tokens that the previous one did not,
                 so every token but the first of a corpus is scored once. A smaller
                 stride gives longer contexts: at least seq_len - stride tokens after
                 the first window. In documents read alone, the first token is scored too
masked diffusion disjoint windows, each scored under num_mc masks (the bound and the masks of validation
                 during training), or token by token from the left, which is exact for that order and needs
                 one forward pass per token
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Unpack

import numpy as np
import torch

from megatron.data.indexed import IndexedTokens
from megatron.evaluation.likelihood import Request, ScoringOptions, gather_scores, iter_rank_batches
from megatron.evaluation.likelihood_diffusion import score_masked_rows, score_tokens_left_to_right
from megatron.evaluation.windows import (
    TextIds,
    Window,
    count_scored_tokens,
    iter_disjoint_windows,
    iter_document_windows,
    iter_strided_windows,
    pad_rows,
    read_window,
)
from megatron.kernels.linear_cross_entropy import linear_nll
from megatron.model.transformer import Gpt
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.world import World
from megatron.tokenizer.kinds import Tokenizer


@dataclass(frozen=True)
class CorpusLoss:
    """Nats and tokens per document; the nats of a bound are averaged over its masks.

    nats      float64 [n_documents]
    tokens    int64 [n_documents]    number of scored tokens
    draws     float64 [num_mc]       nats of the whole corpus under each draw; None if the loss is exact
    n_bytes   UTF-8 bytes of the scored text; None without a tokenizer
    eod_nats  nats of end-of-document tokens, which have no text bytes
    n_eod     number of scored end-of-document tokens
    contexts  float64 [2, n]: nats and tokens by the number of tokens that were read before; None: unknown
    """

    nats: np.ndarray
    tokens: np.ndarray
    draws: np.ndarray | None
    n_bytes: int | None
    eod_nats: float = 0.0
    n_eod: int = 0
    contexts: np.ndarray | None = None

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the corpus.

        loss, perplexity, bits_per_token: over all scored tokens,
            including end-of-document tokens
        bits_per_byte: nats of all other scored tokens, in bits,
            divided by the UTF-8 bytes of their text
        loss_se: standard error over documents, for text of the same distribution
        mc_se: standard error over masks
        mc_interval: 95 % interval of this text's bound,
            by Student's t of the independent draws
        loss_by_context: [least, most, loss] of tokens before
            which least to most tokens of the window were read
        """
        total, n = float(self.nats.sum()), int(self.tokens.sum())
        loss, scored = total / n, int((self.tokens > 0).sum())
        loss_se = mc_se = interval = None
        if scored > 1:
            # linearized standard error of the ratio estimator
            # sum(nats) / sum(tokens) over documents.
            # A mean of losses per document would weight
            # short documents as much as long ones
            spread = float(((self.nats - loss * self.tokens) ** 2).sum())
            loss_se = math.sqrt(spread * scored / (scored - 1)) / n
        if self.draws is not None and len(self.draws) > 1:
            from scipy.stats import t as student  # slow import

            mc_se = float(self.draws.std(ddof=1)) / math.sqrt(len(self.draws)) / n
            # half width of the interval
            reach = float(student.ppf(0.975, len(self.draws) - 1)) * mc_se
            interval = [loss - reach, loss + reach]
        per_byte = None if not self.n_bytes else (total - self.eod_nats) / math.log(2) / self.n_bytes
        return {
            "loss": loss,
            "loss_se": loss_se,
            "mc_se": mc_se,
            "mc_interval": interval,
            "bits_per_token": loss / math.log(2),
            "bits_per_byte": per_byte,
            "perplexity": math.exp(loss) if loss < 700 else None,  # larger values overflow float64
            "n_tokens": n,
            "n_documents": scored,
            "n_bytes": self.n_bytes,
            "n_eod": self.n_eod,
            "loss_by_context": None if self.contexts is None else average_contexts(self.contexts),
        }


def average_contexts(contexts: np.ndarray) -> list[list[float]]:
    """Return [least, most, loss] for 0, 1, 2 to 3, 4 to 7, ... tokens before, of `CorpusLoss.contexts`."""
    rows, least = [], 0
    while least < contexts.shape[1]:
        most = max(2 * least - 1, least)
        nats, tokens = contexts[:, least : most + 1].sum(axis=1)
        if tokens:
            rows.append([least, min(most, contexts.shape[1] - 1), float(nats / tokens)])
        least = most + 1
    return rows


class CorpusScorer:
    """Scores a corpus's windows from `select_windows`; the ranks share the work and all have the loss.

    eod_id   id of the end-of-document token, whose nats are also counted alone; None: unknown
    """

    def __init__(
        self, model: Gpt, corpus: IndexedTokens, windows: Sequence[Window], eod_id: int | None = None,
        **options: Unpack[ScoringOptions],
    ) -> None:  # fmt: skip
        self.model, self.corpus, self.windows, self.eod_id = model, corpus, windows, eod_id
        self.options = options
        self.ends = np.cumsum(corpus.document_tokens)
        self.nats = np.zeros(len(self.ends) + 1)  # the last element is for end-of-document tokens
        self.draws: np.ndarray | None = None
        self.contexts: np.ndarray | None = None

    def score_autoregressive(self) -> CorpusLoss:
        """Compute the exact loss of an autoregressive model."""
        windows, model = self.windows, self.model
        device = model.embedding.weight.device
        self.contexts = np.zeros((2, max(window.n_read for window in windows)))
        lengths_read = [window.n_read for window in windows]
        for rows in iter_rank_batches(lengths_read, np.ones(len(windows), dtype=np.int64), self.options):
            batch = [windows[number] for number, _ in rows]
            ids, lengths = pad_rows([read_window(self.corpus, window) for window in batch])
            inputs = torch.from_numpy(ids[:, :-1].copy()).to(device)
            with torch.inference_mode():
                # padding follows all tokens, so none attends to it
                hidden = model.hidden_states(inputs, causal=True)
                for states, window, row, length in zip(hidden, batch, ids, lengths, strict=True):
                    scored = row[window.n_context : length]
                    targets = torch.from_numpy(scored.copy()).to(device)
                    # the state at p predicts the token at p + 1: states
                    # n_context - 1 .. length - 2 predict ids n_context ..
                    # length - 1
                    nll = linear_nll(states[window.n_context - 1 : length - 1], model.head_weight, targets)
                    nats = nll.double().cpu().numpy()
                    self._add(np.arange(window.scored, window.end), nats, scored)
                    # each token of a window is scored after one more token
                    self.contexts[:, window.n_context : length] += [nats, np.ones_like(nats)]
        return self._reduce()

    def score_bound(self, objective: MaskedDiffusion, num_mc: int) -> CorpusLoss:
        """Estimate the bound from `num_mc` masks per window; a batch contains (window, mask) rows.

        Context tokens, which exist in documents read alone, are
        never masked: the bound excludes them.
        """
        windows, self.draws = self.windows, np.zeros(num_mc)
        # rows and not windows are batched: a batch
        # may contain some of the draws of a window
        n_rows, n_read = np.full(len(windows), num_mc), [window.n_read for window in windows]
        for rows in iter_rank_batches(n_read, n_rows, self.options):
            sequences, hidden, scales, places = [], [], [], []
            for number, draw in rows:
                window = windows[number]
                ids = read_window(self.corpus, window)
                # corrupt() drops a sample's last token, a
                # target of the other objective: append a dummy
                scored = np.append(ids[window.n_context :], 0)
                task = objective.corrupt(scored[None], np.array([window.number]), draw)
                assert task.positions is not None and task.scale is not None, "it scores masked tokens only"
                masked = np.isin(np.arange(len(scored) - 1), task.positions.numpy())
                sequences.append(ids)
                hidden.append(masked)
                scales.append(task.scale.double().numpy())
                places.append(window.scored + np.flatnonzero(masked))
            log_p, _, row_of = score_masked_rows(self.model, sequences, hidden)
            nats = -log_p.numpy() * np.concatenate(scales)
            token_places = np.concatenate(places)
            targets = self.corpus.tokens[token_places].astype(np.int64)
            self._add(token_places, nats, targets, np.array([draw for _, draw in rows])[row_of.numpy()])
        return self._reduce()

    def score_left_to_right(self) -> CorpusLoss:
        """Compute the exact loss of a diffusion model under left-to-right generation, a forward per token."""
        requests = []
        for window in self.windows:
            ids = read_window(self.corpus, window).tolist()
            requests.append(Request(tuple(ids[: window.n_context]), tuple(ids[window.n_context :])))
        max_length = max(window.n_read for window in self.windows) + 1
        log_p, _ = score_tokens_left_to_right(self.model, requests, max_length=max_length, **self.options)
        if self.options["world"].is_first:  # every rank has all values; the sum below must count them once
            places = np.concatenate([np.arange(window.scored, window.end) for window in self.windows])
            self._add(places, -log_p, np.concatenate([request.continuation for request in requests]))
        return self._reduce()

    def _add(
        self, places: np.ndarray, nats: np.ndarray, ids: np.ndarray, draws: np.ndarray | None = None
    ) -> None:
        """Add the nats of tokens `ids` at `places` of the corpus, under `draws`; all [T]."""
        # documents of 3 and 7 tokens: ends 3 10, place 2 is in document
        # 0 and place 3 in document 1; "right" skips empty documents
        documents = np.searchsorted(self.ends, places, side="right")
        # bincount sums in float64 and handles
        # documents that occur several times
        self.nats[:-1] += np.bincount(documents, nats, len(self.ends))
        if self.eod_id is not None:
            self.nats[-1] += nats[ids == self.eod_id].sum()
        if self.draws is not None and draws is not None:
            self.draws += np.bincount(draws, nats, len(self.draws))

    def _reduce(self) -> CorpusLoss:
        """Sum over ranks and return the loss."""
        world = self.options["world"]
        tokens = count_scored_tokens(self.corpus, self.windows)
        nats = gather_scores(torch.from_numpy(self.nats), world)
        draws = None
        if self.draws is not None:
            draws = gather_scores(torch.from_numpy(self.draws), world)
            # self.nats sums over draws, and each
            # draw is an estimate of the same bound
            nats = nats / len(draws)
        contexts = self.contexts
        if contexts is not None:
            contexts = gather_scores(torch.from_numpy(contexts), world)
        return CorpusLoss(nats[:-1], tokens, draws, None, float(nats[-1]), contexts=contexts)


def select_windows(
    corpus: IndexedTokens,
    causal: bool,
    seq_len: int,
    stride: int | None,
    max_samples: int | None,
    text: TextIds | None,
) -> list[Window]:
    """Return the windows to score.

    A diffusion model reads the positions that it predicts, so its
    windows have seq_len ids, not seq_len + 1. Raises ValueError for
    a stride that skips tokens, windows without room for a context,
    or an empty corpus.
    """
    stride = seq_len if stride is None else stride
    if not 1 <= stride <= seq_len:
        raise ValueError(f"--stride: got {stride}, expected 1 to {seq_len}, the positions of a window")
    if text is None:
        iter_windows = iter_strided_windows(corpus, seq_len, stride)
        windows = iter_windows if causal else iter_disjoint_windows(corpus, seq_len)
    elif causal:
        windows = iter_document_windows(corpus, seq_len + 1, stride, text)
    elif seq_len < 2:
        raise ValueError(f"--seq-len: got {seq_len}, expected 2 or more, because one is context")
    else:
        # one of the seq_len ids is context: with this
        # stride every token is scored exactly once
        windows = iter_document_windows(corpus, seq_len, seq_len - 1, text)
    return list(windows if max_samples is None else islice(windows, max_samples))


def count_text_bytes(
    corpus: IndexedTokens, tokenizer: Tokenizer, first: int, tokens: np.ndarray, eod_id: int, world: World
) -> tuple[int, int]:
    """Return (UTF-8 bytes of the scored text, number of scored end-of-document tokens).

    first    index of the first scored token in the corpus
    tokens   scored tokens per document, int64 [n_documents]

    The ranks share the work; all return the total.
    """
    begins = np.cumsum(corpus.document_tokens) - corpus.document_tokens
    n_bytes = n_eod = 0
    for i in np.flatnonzero(tokens)[world.rank :: world.n_ranks].tolist():
        # positive only in the document of `first`: 1 in
        # the first one of a corpus without prefix ids
        begin = max(0, first - int(begins[i]))
        ids = corpus.get_document(i)[begin : begin + int(tokens[i])].tolist()
        words = [token for token in ids if token != eod_id]
        n_eod += len(ids) - len(words)
        n_bytes += len(tokenizer.decode(words).encode())
    totals = gather_scores(torch.tensor([n_bytes, n_eod]), world)
    return int(totals[0]), int(totals[1])
