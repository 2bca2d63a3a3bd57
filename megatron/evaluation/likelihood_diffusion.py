"""Log-likelihoods of continuations under a masked-diffusion model.

left to right   log p = sum_i log p(a_i | context, a_1 .. a_{i-1}, the rest hidden): a forward for each token,
                and in every one all later tokens of the answer are [MASK], so that none can leak
bound           -log p <= E_l E_mask [L / l sum over the l hidden tokens of -log p(token | the others)] with l
                uniform in 1 .. L: masked diffusion's bound by the number of hidden tokens, which has less
                variance than by t (LLaDA, arXiv 2502.09992, eq. 6)

Questions and masks are batched together: a row is one question under one mask.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron.evaluation.generate_diffusion import generate_diffusion
from megatron.evaluation.likelihood import Likelihoods, Progress, Request, cut_from_left, hidden_at
from megatron.evaluation.sampling import Sampling
from megatron.model.gpt import Gpt
from megatron.objective.linear_cross_entropy import linear_log_p
from megatron.objective.noise import Purpose, generator
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.world import World
from megatron.tokenizer.vocabulary import VocabularyRows


def left_to_right(
    model: Gpt,
    requests: Sequence[Request],
    *,
    batch_size: int,
    max_length: int,
    world: World,
    progress: Progress = lambda n: None,
) -> Likelihoods:
    """Exact log p of each continuation when it is written from the left, and whether it would be, greedily.

    `batch_size` rows a forward, of which a request has one for each token of its continuation.
    """
    log_p, best = tokens_left_to_right(
        model, requests, batch_size=batch_size, max_length=max_length, world=world, progress=progress
    )
    ends = np.cumsum([len(request.continuation) for request in requests])
    each = np.split(np.arange(len(log_p)), ends[:-1])
    greedy = np.array([best[tokens].all() for tokens in each], dtype=bool)
    return Likelihoods(
        np.array([log_p[tokens].sum() for tokens in each]), greedy, cut_from_left(requests, max_length)[1]
    )


def tokens_left_to_right(
    model: Gpt,
    requests: Sequence[Request],
    *,
    batch_size: int,
    max_length: int,
    world: World,
    progress: Progress = lambda n: None,
) -> tuple[np.ndarray, np.ndarray]:
    """log p of every token of the continuations, end to end, float64, and whether it is the likeliest.

    A request may be without context here.
    """
    sequences, _ = cut_from_left(requests, max_length)
    n_rows = np.array([len(request.continuation) for request in requests], dtype=np.int64)
    begins = np.concatenate([[0], np.cumsum(n_rows)])
    found = torch.zeros(2, int(begins[-1]), dtype=torch.float64)
    for batch in _shares(sequences, n_rows, batch_size, world, progress):
        hidden = [np.arange(n_rows[number]) >= row for number, row in batch]
        log_p, best, _ = _score(model, [sequences[n] for n, _ in batch], hidden, first_only=True)
        places = torch.tensor([begins[number] + row for number, row in batch])
        found[0, places], found[1, places] = log_p, best.double()
    found = sum_over_ranks(found.to(world.device), world).cpu().numpy()
    return found[0], found[1] > 0


def bound(
    model: Gpt,
    requests: Sequence[Request],
    *,
    num_mc: int,
    seed: int,
    batch_size: int,
    max_length: int,
    world: World,
    progress: Progress = lambda n: None,
) -> Likelihoods:
    """The bound from `num_mc` masks for each request, keyed by seed and place in the list.

    An answer so short that it has no more than num_mc masks is bounded exactly, by all of them. `greedy` is
    False throughout: `decoded_greedily` tells it.
    """
    if num_mc < 1:
        raise ValueError(f"num_mc: found {num_mc}, wanted 1 or more")
    sequences, n_cut = cut_from_left(requests, max_length)
    lengths = [len(request.continuation) for request in requests]
    n_rows = np.array([_n_masks(length, num_mc) for length in lengths], dtype=np.int64)
    found = torch.zeros(len(requests), dtype=torch.float64)
    for batch in _shares(sequences, n_rows, batch_size, world, progress):
        masks = {n: answer_masks(lengths[n], num_mc, seed, n) for n in {n for n, _ in batch}}
        hidden = [masks[number][0][row] for number, row in batch]
        weights = torch.tensor([masks[number][1][row] for number, row in batch], dtype=torch.float64)
        log_p, _, of = _score(model, [sequences[n] for n, _ in batch], hidden)
        found.index_add_(0, torch.tensor([n for n, _ in batch])[of], log_p * weights[of])
    found = sum_over_ranks(found.to(world.device), world).cpu().numpy()
    return Likelihoods(found, np.zeros(len(requests), dtype=bool), n_cut)


def decoded_greedily(
    model: Gpt,
    requests: Sequence[Request],
    *,
    batch_size: int,
    max_length: int,
    world: World,
    progress: Progress = lambda n: None,
) -> Likelihoods:
    """Whether the model writes each continuation when it fills in the likeliest token first, one a forward.

    `log_p` is not a number.
    """
    sequences, n_cut = cut_from_left(requests, max_length)
    lengths = [len(request.continuation) for request in requests]
    alike: dict[tuple[int, int], list[int]] = {}
    for i, sequence in enumerate(sequences):
        alike.setdefault((len(sequence), lengths[i]), []).append(i)
    found = torch.zeros(len(requests), dtype=torch.float64)
    turn = 0
    for (_, n_new), members in sorted(alike.items(), reverse=True):
        for begin in range(0, len(members), batch_size):
            batch = members[begin : begin + batch_size]
            if turn % world.n_ranks == world.rank:
                prompts = [sequences[i][: len(sequences[i]) - n_new] for i in batch]
                written = _fill(model, prompts, n_new)
                for i, tokens in zip(batch, written, strict=True):
                    found[i] = float(tuple(tokens) == tuple(requests[i].continuation))
            turn += 1
            progress(len(batch))
    found = sum_over_ranks(found.to(world.device), world).cpu().numpy()
    return Likelihoods(np.full(len(requests), math.nan), found > 0, n_cut)


def _fill(model: Gpt, prompts: list[tuple[int, ...]], n_new: int) -> list[list[int]]:
    if not n_new:
        return [[] for _ in prompts]
    how = Sampling(temperature=0)
    return generate_diffusion(model, prompts, n_new_tokens=n_new, n_steps=n_new, how=how)


def answer_masks(length: int, num_mc: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(hidden bool [M, length], weight float64 [M]) such that the bound is sum_m weight_m CE(hidden_m).

    M = 2^length - 1 where that is at most num_mc: all masks with their chances, sum_l 1 / (l C(length, l)).
    Else M = num_mc, and how many are hidden follows t, one draw in each of num_mc equal parts of (0, 1).
    """
    n_masks = _n_masks(length, num_mc)
    if n_masks == 2**length - 1:
        codes = np.arange(1, n_masks + 1)
        hidden = (codes[:, None] >> np.arange(length)) & 1 > 0
        ways = np.array([1] + [n * math.comb(length, n) for n in range(1, length + 1)])
        return hidden, 1.0 / ways[hidden.sum(axis=1)]
    rng = generator(seed, Purpose.ANSWER, number)
    t = (np.arange(num_mc) + rng.random(num_mc)) / num_mc
    n_hidden = np.minimum(1 + np.floor(t * length).astype(np.int64), length)  # t may be rounded up to 1
    order = rng.random((num_mc, length)).argsort(axis=1).argsort(axis=1)
    return order < n_hidden[:, None], length / n_hidden / num_mc


def _n_masks(length: int, num_mc: int) -> int:
    """Rows that the bound of one answer takes."""
    return min(num_mc, 2**length - 1) if length < 63 else num_mc


def _shares(
    sequences: Sequence[Sequence[int]],
    n_rows: np.ndarray,
    batch_size: int,
    world: World,
    progress: Progress,
) -> Iterator[list[tuple[int, int]]]:
    """This rank's batches of (request, row of it), the longest first; batches are the same for all ranks."""
    order = np.array(sorted(range(len(sequences)), key=lambda i: -len(sequences[i])), dtype=np.int64)
    ends = np.cumsum(n_rows[order])
    told = 0
    for turn, begin in enumerate(range(0, int(ends[-1]) if len(ends) else 0, batch_size)):
        rows = np.arange(begin, min(begin + batch_size, int(ends[-1])))
        at = np.searchsorted(ends, rows, side="right")
        if turn % world.n_ranks == world.rank:
            inside = rows - (ends[at] - n_rows[order[at]])
            yield list(zip(order[at].tolist(), inside.tolist(), strict=True))
        done = int(np.searchsorted(ends, rows[-1] + 1, side="right"))
        progress(done - told)
        told = done


@torch.inference_mode()
def _score(
    model: Gpt, sequences: Sequence[Sequence[int]], hidden: Sequence[np.ndarray], first_only: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """One forward over rows whose last tokens are hidden where `hidden` [answer] says.

    Returns for each hidden token, or for the first of each row: log p float64 [T], whether it is the
    likeliest, and its row.
    """
    width = max(map(len, sequences))
    mask_id = VocabularyRows(model.config.n_tokens).mask_id
    tokens = np.zeros((len(sequences), width), dtype=np.int64)
    lengths = np.array([len(sequence) for sequence in sequences])
    places, targets, of = [], [], []
    for b, (sequence, gone) in enumerate(zip(sequences, hidden, strict=True)):
        tokens[b, : len(sequence)] = sequence
        where = len(sequence) - len(gone) + np.flatnonzero(gone)
        asked = where[:1] if first_only else where
        places.append(b * width + asked)
        targets.append(tokens[b, asked])
        of += [b] * len(asked)
        tokens[b, where] = mask_id
    device = model.embedding.weight.device
    reading = {}
    if lengths.min() < width:  # padding would be read from the left too
        there = torch.from_numpy(np.arange(width) < lengths[:, None]).to(device)
        reading["visible"] = there[:, None, :].expand(-1, width, -1)
    rows = hidden_at(model, tokens, np.concatenate(places), causal=False, **reading)
    asked = torch.from_numpy(np.concatenate(targets)).to(device)
    log_p, best = linear_log_p(rows, model.head_weight, torch.arange(len(rows), device=device), asked)
    return log_p.cpu().double(), best.cpu(), torch.tensor(of)
