"""Log-likelihoods of continuations under a masked-diffusion model.

left to right   log p = sum_i log p(a_i | context, a_1 .. a_{i-1},
                the rest masked): one forward pass per token, in which all
                later tokens of the answer are [MASK], so that none can leak
bound           -log p <= E_l E_mask [L / l sum over the l masked tokens of -log
                p(token | the others)] with l uniform in 1 .. L: masked diffusion's
                bound in terms of the number of masked tokens, which has less
                variance than in terms of t (LLaDA, arXiv 2502.09992, eq. 6)

Requests and masks are batched together:
a row is one request under one mask.
"""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from megatron.evaluation.likelihood import (
    Likelihoods,
    Request,
    RequestOptions,
    compute_hidden_at,
    gather_scores,
    iter_rank_batches,
    truncate_left,
)
from megatron.generation.generate_diffusion import generate_diffusion
from megatron.generation.sampling import Sampling
from megatron.kernels.linear_cross_entropy import linear_log_p
from megatron.model.transformer import Gpt
from megatron.objective.sample_noise import Purpose, make_generator


def score_left_to_right(
    model: Gpt, requests: Sequence[Request], **options: Unpack[RequestOptions]
) -> Likelihoods:
    """Compute the exact log p of each continuation under left-to-right generation, and its greedy flag.

    `batch_size` is in rows per forward pass. A request has one row
    per token of its continuation.
    """
    log_p, best = score_tokens_left_to_right(model, requests, **options)
    ends = np.cumsum([len(request.continuation) for request in requests])
    request_tokens = np.split(np.arange(len(log_p)), ends[:-1])
    sums = np.array([log_p[tokens].sum() for tokens in request_tokens])
    greedy = np.array([best[tokens].all() for tokens in request_tokens], dtype=bool)
    return Likelihoods(sums, greedy, truncate_left(requests, options["max_length"])[1])


def score_tokens_left_to_right(
    model: Gpt, requests: Sequence[Request], **options: Unpack[RequestOptions]
) -> tuple[np.ndarray, np.ndarray]:
    """Return log p (float64) of every token of the concatenated continuations, and whether it is the argmax.

    A request may have an empty context.
    """
    sequences, _ = truncate_left(requests, options["max_length"])
    n_rows = np.array([len(request.continuation) for request in requests], dtype=np.int64)
    # continuations of 2 and 3 tokens: begins 0 2 5, and
    # token r of request n has the index begins[n] + r
    begins = np.concatenate([[0], np.cumsum(n_rows)])
    scores = torch.zeros(2, int(begins[-1]), dtype=torch.float64)
    for batch in iter_rank_batches([len(sequence) for sequence in sequences], n_rows, options):
        # row r of a request: tokens r, r + 1, ... of
        # the answer are masked, and token r is scored
        hidden = [np.arange(n_rows[number]) >= row for number, row in batch]
        log_p, best, _ = score_masked_rows(model, [sequences[n] for n, _ in batch], hidden, first_only=True)
        places = torch.tensor([begins[number] + row for number, row in batch])
        scores[0, places], scores[1, places] = log_p, best.double()
    all_scores = gather_scores(scores, options["world"])
    return all_scores[0], all_scores[1] > 0


def score_bound(
    model: Gpt, requests: Sequence[Request], *, num_mc: int, seed: int, **options: Unpack[RequestOptions]
) -> Likelihoods:
    """Estimate the bound from `num_mc` masks per request, keyed by seed and index in the list.

    For an answer with at most num_mc different masks, the bound is
    computed exactly from all of them. `greedy` is False for all
    requests; `decode_greedily` computes it.
    """
    sequences, n_truncated = truncate_left(requests, options["max_length"])
    lengths = [len(request.continuation) for request in requests]
    n_rows = np.array([_count_masks(length, num_mc) for length in lengths], dtype=np.int64)
    log_p_bounds = torch.zeros(len(requests), dtype=torch.float64)
    for batch in iter_rank_batches([len(sequence) for sequence in sequences], n_rows, options):
        masks = {n: draw_answer_masks(lengths[n], num_mc, seed, n) for n in {n for n, _ in batch}}
        hidden = [masks[number][0][row] for number, row in batch]
        weights = torch.tensor([masks[number][1][row] for number, row in batch], dtype=torch.float64)
        log_p, _, row_of = score_masked_rows(model, [sequences[n] for n, _ in batch], hidden)
        log_p_bounds.index_add_(0, torch.tensor([n for n, _ in batch])[row_of], log_p * weights[row_of])
    all_bounds = gather_scores(log_p_bounds, options["world"])
    return Likelihoods(all_bounds, np.zeros(len(requests), dtype=bool), n_truncated)


def decode_greedily(
    model: Gpt, requests: Sequence[Request], **options: Unpack[RequestOptions]
) -> Likelihoods:
    """Check whether greedy generation, most confident token first, gives each continuation.

    One token per forward pass. `log_p` is NaN.
    """
    sequences, n_truncated = truncate_left(requests, options["max_length"])
    matches = torch.zeros(len(requests), dtype=torch.float64)
    ones = np.ones(len(requests), dtype=np.int64)
    for batch in iter_rank_batches([len(sequence) for sequence in sequences], ones, options):
        # answers of one length are generated together
        groups: dict[int, list[int]] = {}
        for i, _ in batch:
            groups.setdefault(len(requests[i].continuation), []).append(i)
        for n_new, members in groups.items():
            prompts = [sequences[i][: len(sequences[i]) - n_new] for i in members]
            for i, tokens in zip(members, _generate_greedily(model, prompts, n_new), strict=True):
                matches[i] = float(tuple(tokens) == tuple(requests[i].continuation))
    is_equal = gather_scores(matches, options["world"]) > 0
    return Likelihoods(np.full(len(requests), math.nan), is_equal, n_truncated)


def _generate_greedily(model: Gpt, prompts: list[tuple[int, ...]], n_new: int) -> list[list[int]]:
    if not n_new:
        return [[] for _ in prompts]
    sampling = Sampling(temperature=0)
    return generate_diffusion(model, prompts, n_new_tokens=n_new, n_steps=n_new, sampling=sampling)


def draw_answer_masks(length: int, num_mc: int, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (hidden bool [M, length], weight float64 [M]) for the bound sum_m weight_m CE(hidden_m).

    M = 2^length - 1 if that is at most num_mc: all masks. A mask of
    l tokens has probability 1 / (length C(length, l)) and factor
    length / l, so its weight is 1 / (l C(length, l)). Else M =
    num_mc: the number of masked tokens follows t, stratified with
    one draw in each of num_mc equal parts of (0, 1), and the weight
    is length / l / num_mc.
    """
    n_masks = _count_masks(length, num_mc)
    if n_masks == 2**length - 1:
        # bit i of a code: token i is masked. length
        # 2: masks 10, 01 and 11, each of weight 1/2.
        codes = np.arange(1, n_masks + 1)
        hidden = (codes[:, None] >> np.arange(length)) & 1 > 0
        ways = np.array([1] + [n * math.comb(length, n) for n in range(1, length + 1)])
        return hidden, 1.0 / ways[hidden.sum(axis=1)]
    rng = make_generator(seed, Purpose.ANSWER, number)
    # one t in each part has a smaller variance
    # than independent t, and the same mean
    t = (np.arange(num_mc) + rng.random(num_mc)) / num_mc
    n_hidden = np.minimum(1 + np.floor(t * length).astype(np.int64), length)  # t can be rounded up to 1
    # argsort of argsort: random ranks; the
    # n_hidden smallest ranks are a uniform subset
    order = rng.random((num_mc, length)).argsort(axis=1).argsort(axis=1)
    return order < n_hidden[:, None], length / n_hidden / num_mc


def _count_masks(length: int, num_mc: int) -> int:
    """Return the number of masks, which is the number of rows, for the bound of one answer."""
    return min(num_mc, 2**length - 1) if length < 63 else num_mc


@torch.inference_mode()
def score_masked_rows(
    model: Gpt,
    sequences: Sequence[Any],
    hidden: Sequence[np.ndarray],
    first_only: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one forward pass over rows of ids whose last tokens are masked by `hidden` (bool [answer] each).

    Returns for every masked token (first_only:
    for the first of each row): log p float64 [T],
    whether it is the argmax, and its row.
    """
    width = max(map(len, sequences))
    mask_id = model.config.mask_row
    tokens = np.zeros((len(sequences), width), dtype=np.int64)
    lengths = np.array([len(sequence) for sequence in sequences])
    places, targets, row_of = [], [], []
    for b, (sequence, is_hidden) in enumerate(zip(sequences, hidden, strict=True)):
        tokens[b, : len(sequence)] = sequence
        hidden_columns = len(sequence) - len(is_hidden) + np.flatnonzero(is_hidden)
        scored_columns = hidden_columns[:1] if first_only else hidden_columns
        places.append(b * width + scored_columns)
        # read before the next lines overwrite them with [MASK]
        targets.append(tokens[b, scored_columns])
        row_of += [b] * len(scored_columns)
        tokens[b, hidden_columns] = mask_id
    device = model.embedding.weight.device
    visible = None
    if lengths.min() < width:  # bidirectional attention would read the padding
        is_token = torch.from_numpy(np.arange(width) < lengths[:, None]).to(device)
        visible = is_token[:, None, :].expand(-1, width, -1)
    rows = compute_hidden_at(model, tokens, np.concatenate(places), causal=False, visible=visible)
    target_ids = torch.from_numpy(np.concatenate(targets)).to(device)
    log_p, best = linear_log_p(rows, model.head_weight, torch.arange(len(rows), device=device), target_ids)
    return log_p.cpu().double(), best.cpu(), torch.tensor(row_of)
