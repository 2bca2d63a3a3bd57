"""Log-likelihoods of continuations under an autoregressive model, with shared prefixes read once.

Requests with a common prefix (the choices of a question, or
questions after the same examples) are packed into one row: the
prefix, then the rest of each request. Each rest attends to the
prefix and to itself, at the positions that it would have alone.
Keys and values of a context are therefore computed once, and
choices of one token add nothing to the forward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from megatron.kernels.linear_cross_entropy import linear_log_p
from megatron.model.transformer import Gpt
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.world import World

WORTH_SHARING = 4  # a shared prefix is at least 1 / WORTH_SHARING of a sequence
ProgressCallback = Callable[[int], None]  # called with the number of newly finished requests


class ScoringOptions(TypedDict):
    """Options of all functions that score.

    batch_size  rows per forward pass; a row is a request
                or a window, under masked diffusion with one mask
    world       ranks that share the work
    progress    called when requests or windows are finished
    """

    batch_size: int
    world: World
    progress: NotRequired[ProgressCallback]


class RequestOptions(ScoringOptions):
    """max_length: positions of the model."""

    max_length: int


@dataclass(frozen=True)
class Request:
    """Ids of a context (at least one) and of a continuation."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def truncate(self, n: int) -> tuple[int, ...]:
        """Return the last n tokens of context and continuation.

        Raises ValueError if that leaves no token of the context.
        """
        if len(self.continuation) >= n:
            raise ValueError(
                f"a continuation of {len(self.continuation)} tokens leaves no room for a context: "
                f"the model scores at most {n - 1} tokens after one token of context"
            )
        return (self.context + self.continuation)[-n:]


@dataclass(frozen=True)
class Likelihoods:
    """Scores of n requests, in their order.

    log_p        float64 [n]  nats; NaN if it was not requested
    greedy       bool [n]     whether greedy generation gives the continuation
    n_truncated  number of requests whose context was
                 truncated on the left to the model's positions
    """

    log_p: np.ndarray
    greedy: np.ndarray
    n_truncated: int


@dataclass
class _Row:
    """Requests packed into one row: `shared` tokens, then the rest of each request.

    numbers   indices of the requests
    inputs    all input tokens of each request
    shared    length of the common prefix
    """

    numbers: list[int]
    inputs: list[tuple[int, ...]]
    shared: int

    @property
    def length(self) -> int:
        return self.shared + sum(len(tokens) - self.shared for tokens in self.inputs)


def truncate_left(requests: Sequence[Request], n: int) -> tuple[list[tuple[int, ...]], int]:
    """Return the last n tokens of each request, and the number of requests that were truncated."""
    sequences = [request.truncate(n) for request in requests]
    whole = (len(request.context) + len(request.continuation) for request in requests)
    return sequences, sum(len(sequence) < length for sequence, length in zip(sequences, whole, strict=True))


def score_autoregressive(
    model: Gpt, requests: Sequence[Request], **options: Unpack[RequestOptions]
) -> Likelihoods:
    """Compute log p(continuation | context) of each request.

    The batches are shared by the ranks but do not depend on their
    number, so neither do the results.
    """
    batch_size, world = options["batch_size"], options["world"]
    # the last token is only predicted
    sequences, n_truncated = truncate_left(requests, options["max_length"] + 1)
    scores = torch.zeros(len(requests), 2, dtype=torch.float64)
    # Inputs are sequences without their last token:
    # four choices of one token after a context of 100
    # have equal inputs, and packed they read 100 tokens
    # instead of 400. a document mask excludes packing,
    # because the model then computes positions itself
    most = 1 if model.config.document_mask else batch_size
    rows = _build_rows([sequence[:-1] for sequence in sequences], most)
    for turn, batch in enumerate(_iter_batches(rows, batch_size)):
        if turn % world.n_ranks == world.rank:
            numbers, log_p, greedy = _score_rows(model, batch, requests)
            scores[numbers, 0], scores[numbers, 1] = log_p, greedy.double()
        _report(sum(len(row.numbers) for row in batch), options)
    gathered = gather_scores(scores, world)
    return Likelihoods(gathered[:, 0], gathered[:, 1] > 0, n_truncated)


def gather_scores(scores: Tensor, world: World) -> np.ndarray:
    """Return scores (float64) on all ranks; each was filled in on one rank, and is 0 on the others."""
    return sum_over_ranks(scores.to(world.device), world).cpu().numpy()


def iter_rank_batches(
    lengths: Sequence[int], n_rows: np.ndarray, options: ScoringOptions
) -> Iterator[list[tuple[int, int]]]:
    """Yield this rank's batches of (item, row of the item), longest item first.

    lengths   tokens of each item, a request or a window
    n_rows    int64 [items]  rows of each item

    The division into batches does not depend on the number of ranks.
    """
    # Longest first: little padding, and memory peaks at
    # the first batch. Batch t belongs to rank t mod n.
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    # All rows of all items are numbered consecutively
    # in this order; a batch is a range of numbers.
    # n_rows 2 3 in this order and batch_size 2: ends
    # 2 5; rows 0 1 | 2 3 | 4 are (item 0: 0 1), (item
    # 1: 0 1), (item 1: 2). side="right" skips items without rows.
    ends = np.cumsum(n_rows[order])
    world, batch_size, n_reported = options["world"], options["batch_size"], 0
    for turn, begin in enumerate(range(0, int(ends[-1]) if len(ends) else 0, batch_size)):
        rows = np.arange(begin, min(begin + batch_size, int(ends[-1])))
        at = np.searchsorted(ends, rows, side="right")
        if turn % world.n_ranks == world.rank:
            row_in_item = rows - (ends[at] - n_rows[order[at]])
            yield list(zip(order[at].tolist(), row_in_item.tolist(), strict=True))
        # items whose last row is in this batch or an earlier one
        done = int(np.searchsorted(ends, rows[-1] + 1, side="right"))
        _report(done - n_reported, options)
        n_reported = done


def _report(n: int, options: ScoringOptions) -> None:
    if "progress" in options:
        options["progress"](n)


def _build_rows(inputs: Sequence[tuple[int, ...]], most: int) -> list[_Row]:
    """Pack requests into rows where that reduces the tokens to read, at most `most` per row; longest first.

    Requests are visited in lexicographic order, so that those with
    a long common prefix are adjacent.
    """
    rows: list[_Row] = []
    for i in sorted(range(len(inputs)), key=lambda i: inputs[i]):
        tokens = inputs[i]
        if rows:
            row = rows[-1]
            shared, n = _count_common_prefix(row.inputs[-1][: row.shared], tokens), len(row.numbers)
            # n + 1 requests may share less than n did. Packing saves (n
            # - 1) * row.shared tokens before this request and n *
            # shared with it, and must not save less. four requests
            # share 100 tokens, a fifth only 10: 10 * 4 < 100 * 3, so it
            # begins a new row
            if n < most and shared * n > row.shared * (n - 1) and shared * WORTH_SHARING >= len(tokens):
                row.numbers.append(i)
                row.inputs.append(tokens)
                row.shared = shared
                continue
        rows.append(_Row([i], [tokens], len(tokens)))
    return sorted(rows, key=lambda row: -row.length)


def _count_common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def _iter_batches(rows: Sequence[_Row], batch_size: int) -> Iterator[list[_Row]]:
    """Yield batches of consecutive rows with at most `batch_size` requests, or of a single row."""
    batch: list[_Row] = []
    n = 0
    for row in rows:
        if batch and n + len(row.numbers) > batch_size:
            yield batch
            batch, n = [], 0
        batch.append(row)
        n += len(row.numbers)
    if batch:
        yield batch


@torch.inference_mode()
def _score_rows(
    model: Gpt, rows: Sequence[_Row], requests: Sequence[Request]
) -> tuple[list[int], Tensor, Tensor]:
    """Score the requests of a few rows in one forward pass: (request indices, log p float64, greedy bool)."""
    width = max(row.length for row in rows)
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(tokens)
    parts = np.zeros_like(tokens)  # number of the request in its row; 0: shared prefix and padding
    places: list[np.ndarray] = []  # per request: flat indices in [B * S] that predict its continuation
    numbers: list[int] = []
    for b, row in enumerate(rows):
        end = row.shared
        tokens[b, :end] = row.inputs[0][:end]
        positions[b, :end] = np.arange(end)
        for part, (number, sequence) in enumerate(zip(row.numbers, row.inputs, strict=True), 1):
            # shared 3, rests of 2 and 1 tokens: tokens s s s
            # a a b, positions 0 1 2 3 4 3, parts 0 0 0 1 1 2
            span = slice(end, end + len(sequence) - row.shared)
            tokens[b, span] = sequence[row.shared :]
            positions[b, span] = np.arange(row.shared, len(sequence))
            parts[b, span] = part
            columns = np.concatenate([np.arange(row.shared), np.arange(span.start, span.stop)])
            n = len(requests[number].continuation)
            # position i predicts token i + 1, so the last n
            # inputs predict the n tokens of the continuation
            places.append(b * width + columns[len(sequence) - n :])
            numbers.append(number)
            end = span.stop
    device = model.embedding.weight.device
    visible = position_ids = None
    if parts.any():  # a position attends to the shared prefix and to its own request
        part_of = torch.from_numpy(parts).to(device)
        # [B, S, S], causal mask applies in addition
        # padding has part 0 too, but it follows
        # all tokens of its row: causality hides it
        visible = (part_of[:, None, :] == 0) | (part_of[:, None, :] == part_of[:, :, None])
        position_ids = torch.from_numpy(positions).to(device)
    # several requests may use the same position
    # (the end of a shared context): compute it once
    unique_places, place = np.unique(np.concatenate(places), return_inverse=True)
    targets = np.concatenate([requests[number].continuation for number in numbers]).astype(np.int64)
    states = compute_hidden_at(model, tokens, unique_places, True, visible=visible, positions=position_ids)
    rows_of, targets_of = torch.from_numpy(place).to(device), torch.from_numpy(targets).to(device)
    log_p, best = linear_log_p(states, model.head_weight, rows_of, targets_of)
    lengths = [len(place) for place in places]
    # float64 before the sum: an answer may have thousands of tokens
    log_p = torch.stack([part.sum() for part in log_p.cpu().double().split(lengths)])
    greedy = torch.stack([part.all() for part in best.cpu().split(lengths)])
    return numbers, log_p, greedy


def compute_hidden_at(
    model: Gpt, tokens: np.ndarray, places: np.ndarray, causal: bool,
    *, visible: Tensor | None = None, positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the final hidden states [T, D] at some places of tokens int64 [B, S].

    places               int64 [T], increasing: position p of row b is b * S + p
    visible, positions   as in `Gpt.hidden_states`

    Only these places are computed through the last layer.
    """
    n_rows, width = tokens.shape
    row, position = np.divmod(places, width)
    n_queries = np.bincount(row, minlength=n_rows)
    # places -> (row, column) of a rectangular table
    # of query positions, padded with position 0
    # width 4, places 1 3 6: rows 0 0 1, n_queries 2 1,
    # columns 0 1 0, query_positions [[1, 3], [2, 0]]. The
    # padded 0 is computed and never selected.
    column = np.arange(len(places)) - (n_queries.cumsum() - n_queries)[row]
    query_positions = np.zeros((n_rows, int(n_queries.max(initial=0))), dtype=np.int64)
    query_positions[row, column] = position
    device = model.embedding.weight.device
    read, queries = torch.from_numpy(tokens).to(device), torch.from_numpy(query_positions).to(device)
    states = model.hidden_states(
        read, causal, positions=positions, visible=visible, query_positions=queries
    ).flatten(0, 1)
    return states.index_select(0, torch.from_numpy(row * query_positions.shape[1] + column).to(device))
