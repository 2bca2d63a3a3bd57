"""Log-likelihoods of continuations under an autoregressive model: what is shared is read once.

Requests whose tokens begin alike, the choices of a question or questions behind the same examples, are laid
into one row: first what they share, then what each adds. An added part sees what is shared and itself, and
stands at the positions it would have alone, so that keys and values of a context are computed once, and
choices of one token add nothing to the forward at all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.model.gpt import Gpt
from megatron.objective.linear_cross_entropy import linear_log_p
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.world import World

WORTH_SHARING = 4  # what is shared is at least one part in so many of a sequence
Progress = Callable[[int], None]  # told how many requests were just finished


@dataclass(frozen=True)
class Request:
    """Ids of a context, at least one, and of what may follow it."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def cut(self, n: int) -> tuple[int, ...]:
        """The last n tokens of both. ValueError where the continuation alone would be cut."""
        if len(self.continuation) >= n:
            raise ValueError(
                f"a continuation of {len(self.continuation)} tokens leaves no room for any context: "
                f"the model scores {n - 1} at most after one token of it"
            )
        return (self.context + self.continuation)[-n:]


@dataclass(frozen=True)
class Likelihoods:
    """Of n requests, in their order.

    log_p    float64 [n]  nats; not a number where it was not asked for
    greedy   bool [n]     whether the model itself would have written the continuation
    n_cut    requests whose context was cut from the left, since the model has not so many positions
    """

    log_p: np.ndarray
    greedy: np.ndarray
    n_cut: int


@dataclass
class _Row:
    """Requests `numbers` in one row: `shared` tokens, then what each adds; `inputs` are their own tokens."""

    numbers: list[int]
    inputs: list[tuple[int, ...]]
    shared: int

    @property
    def length(self) -> int:
        return self.shared + sum(len(tokens) - self.shared for tokens in self.inputs)


def cut_from_left(requests: Sequence[Request], n: int) -> tuple[list[tuple[int, ...]], int]:
    """The last n tokens of each request, and of how many that is not all."""
    sequences = [request.cut(n) for request in requests]
    whole = (len(request.context) + len(request.continuation) for request in requests)
    return sequences, sum(len(one) < length for one, length in zip(sequences, whole, strict=True))


def autoregressive_likelihoods(
    model: Gpt,
    requests: Sequence[Request],
    *,
    batch_size: int,
    max_length: int,
    world: World,
    progress: Progress = lambda n: None,
) -> Likelihoods:
    """log p(continuation | context) of each request; `batch_size` requests a forward, `max_length` positions.

    Batches do not depend on the number of ranks, which share them, so neither does any figure.
    """
    sequences, n_cut = cut_from_left(requests, max_length + 1)  # the last token is not read
    found = torch.zeros(len(requests), 2, dtype=torch.float64)
    # a model that keeps documents apart counts positions by itself
    rows = _rows([sequence[:-1] for sequence in sequences], 1 if model.config.document_mask else batch_size)
    for turn, batch in enumerate(_batches(rows, batch_size)):
        if turn % world.n_ranks == world.rank:
            numbers, log_p, greedy = _score(model, batch, requests)
            found[numbers, 0], found[numbers, 1] = log_p, greedy.double()
        progress(sum(len(row.numbers) for row in batch))
    found = sum_over_ranks(found.to(world.device), world).cpu()
    return Likelihoods(found[:, 0].numpy(), found[:, 1].numpy() > 0, n_cut)


def _rows(inputs: Sequence[tuple[int, ...]], most: int) -> list[_Row]:
    """Requests laid together where that is less to read, at most `most` in a row; the longest rows first."""
    rows: list[_Row] = []
    for i in sorted(range(len(inputs)), key=lambda i: inputs[i]):
        tokens = inputs[i]
        if rows:
            row = rows[-1]
            shared, n = _alike(row.inputs[-1][: row.shared], tokens), len(row.numbers)
            # n + 1 requests share less than n did: joining must not undo more than it saves
            if n < most and shared * n > row.shared * (n - 1) and shared * WORTH_SHARING >= len(tokens):
                row.numbers.append(i)
                row.inputs.append(tokens)
                row.shared = shared
                continue
        rows.append(_Row([i], [tokens], len(tokens)))
    return sorted(rows, key=lambda row: -row.length)


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens are equal."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def _batches(rows: Sequence[_Row], batch_size: int) -> Iterator[list[_Row]]:
    """Rows of nearly one length, as many as hold `batch_size` requests, or one row."""
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
def _score(model: Gpt, rows: Sequence[_Row], requests: Sequence[Request]) -> tuple[list[int], Tensor, Tensor]:
    """(request numbers, log p float64, greedy bool) of the requests in a few rows, by one forward."""
    width = max(row.length for row in rows)
    tokens = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.zeros_like(tokens)
    parts = np.zeros_like(tokens)  # 0: shared, and padding, which is behind all and seen by none
    places: list[np.ndarray] = []  # for each request, which rows of the flat [B * S] predict its continuation
    numbers: list[int] = []
    for b, row in enumerate(rows):
        end = row.shared
        tokens[b, :end] = row.inputs[0][:end]
        positions[b, :end] = np.arange(end)
        for part, (number, own) in enumerate(zip(row.numbers, row.inputs, strict=True), 1):
            here = slice(end, end + len(own) - row.shared)
            tokens[b, here] = own[row.shared :]
            positions[b, here] = np.arange(row.shared, len(own))
            parts[b, here] = part
            where = np.concatenate([np.arange(row.shared), np.arange(here.start, here.stop)])
            n = len(requests[number].continuation)
            places.append(b * width + where[len(own) - n :])
            numbers.append(number)
            end = here.stop
    device = model.embedding.weight.device
    reading = {}
    if parts.any():
        of = torch.from_numpy(parts).to(device)
        reading["visible"] = (of[:, None, :] == 0) | (of[:, None, :] == of[:, :, None])
        reading["positions"] = torch.from_numpy(positions).to(device)
    wanted, place = np.unique(np.concatenate(places), return_inverse=True)
    targets = np.concatenate([requests[number].continuation for number in numbers]).astype(np.int64)
    log_p, best = linear_log_p(
        hidden_at(model, tokens, wanted, causal=True, **reading),
        model.head_weight,
        torch.from_numpy(place).to(device),
        torch.from_numpy(targets).to(device),
    )
    lengths = [len(place) for place in places]
    log_p = torch.stack([part.sum() for part in log_p.cpu().double().split(lengths)])
    greedy = torch.stack([part.all() for part in best.cpu().split(lengths)])
    return numbers, log_p, greedy


def hidden_at(model: Gpt, tokens: np.ndarray, places: np.ndarray, causal: bool, **reading: Tensor) -> Tensor:
    """What the head reads at some places of tokens int64 [B, S], none other of which is computed to the end.

    places   int64 [T], rising: position p of row b is b * S + p
    reading  as for `Gpt.hidden`

    Returns [T, D].
    """
    n_rows, width = tokens.shape
    row, position = np.divmod(places, width)
    n_asked = np.bincount(row, minlength=n_rows)
    column = np.arange(len(places)) - (n_asked.cumsum() - n_asked)[row]
    asked = np.zeros((n_rows, int(n_asked.max(initial=0))), dtype=np.int64)
    asked[row, column] = position
    device = model.embedding.weight.device
    read, wanted = torch.from_numpy(tokens).to(device), torch.from_numpy(asked).to(device)
    states = model.hidden(read, causal, asked=wanted, **reading).flatten(0, 1)
    return states.index_select(0, torch.from_numpy(row * asked.shape[1] + column).to(device))
