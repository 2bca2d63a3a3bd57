"""Log-likelihoods of continuations, compared with one forward pass per token."""

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch

from megatron.evaluation import likelihood, likelihood_diffusion
from megatron.evaluation.likelihood import Likelihoods, Request, _build_rows, score_autoregressive
from megatron.evaluation.likelihood_diffusion import (
    decode_greedily,
    draw_answer_masks,
    score_bound,
    score_left_to_right,
)
from megatron.model.transformer import Gpt
from megatron.parallel.world import World
from tests.evaluation.conftest import ALONE

QUESTION = (3, 1, 4, 1, 5, 9, 2)
REQUESTS = [
    Request(QUESTION, (6, 5)),
    Request(QUESTION, (6, 5, 3, 5)),
    Request(QUESTION, (8,)),
    Request(QUESTION, (9,)),
    Request((2, 7), (1, 8, 2, 8)),
    Request((1,), (8, 2)),
    Request(QUESTION, (6, 5)),
    Request((3, 1, 4, 1, 5), (9, 2, 6)),
    Request((5,) * 30, (3, 3)),
]


def log_softmax(model: Gpt, tokens: list[int], causal: bool) -> torch.Tensor:
    return model(torch.tensor([tokens]), causal=causal)[0].double().log_softmax(-1)


def by_hand(model: Gpt, request: Request, max_length: int) -> tuple[float, bool]:
    """Score with one forward pass per token; the context is truncated on the left as in lm-eval."""
    tokens = list(request.context + request.continuation)[-(max_length + 1) :]
    n = len(request.continuation)
    log_p, greedy = 0.0, True
    for i in range(len(tokens) - n, len(tokens)):
        chances = log_softmax(model, tokens[:i], causal=True)[-1]
        log_p += float(chances[tokens[i]])
        greedy &= int(chances.argmax()) == tokens[i]
    return log_p, greedy


def score_requests(score: Callable[..., Likelihoods], model: Gpt, **more: object) -> Likelihoods:
    return score(model, REQUESTS, **{"batch_size": 4, "max_length": 64, "world": ALONE, **more})


@pytest.mark.parametrize("batch_size", [1, 3, 100])
@pytest.mark.parametrize("max_length", [64, 8])
def test_scores_equal_those_of_a_pass_per_token(tiny: Gpt, batch_size: int, max_length: int) -> None:
    scores = score_requests(score_autoregressive, tiny, batch_size=batch_size, max_length=max_length)
    expected = [by_hand(tiny, request, max_length) for request in REQUESTS]
    assert scores.log_p == pytest.approx([log_p for log_p, _ in expected], abs=1e-4)
    assert scores.greedy.tolist() == [greedy for _, greedy in expected]
    # two requests have more than 9 tokens
    assert scores.n_truncated == (0 if max_length == 64 else 2)


@pytest.mark.parametrize("score", [score_autoregressive, score_left_to_right, score_bound])
def test_the_ranks_share_the_requests_and_their_scores_add_up(
    tiny: Gpt, monkeypatch: pytest.MonkeyPatch, score: Callable[..., Likelihoods]
) -> None:
    options = {"batch_size": 2} | ({"num_mc": 3, "seed": 0} if score is score_bound else {})
    expected = score_requests(score, tiny, **options).log_p
    for module in (likelihood, likelihood_diffusion):
        monkeypatch.setattr(module, "gather_scores", lambda scores, world: scores.numpy())
    worlds = [World(rank, 3, 0, torch.device("cpu")) for rank in range(3)]
    parts = np.array([score_requests(score, tiny, world=world, **options).log_p for world in worlds])
    assert parts.sum(axis=0) == pytest.approx(expected, abs=1e-5)
    assert (parts != 0).any(axis=1).all() and (parts == 0).any(axis=1).all()  # each has a share


def test_a_greedy_continuation_is_flagged_as_greedy(tiny: Gpt) -> None:
    tokens = list(QUESTION)
    for _ in range(4):
        tokens.append(int(log_softmax(tiny, tokens, causal=True)[-1].argmax()))
    new = tuple(tokens[len(QUESTION) :])
    wrong = (*new[:3], (new[3] + 1) % 40)
    requests = [Request(QUESTION, answer) for answer in (new, wrong, ())]
    scores = score_autoregressive(tiny, requests, batch_size=8, max_length=64, world=ALONE)
    assert scores.greedy.tolist() == [True, False, True]
    assert scores.log_p[2] == 0  # an empty continuation has probability 1


def test_choices_of_one_token_add_no_input_tokens() -> None:
    inputs = [QUESTION] * 4 + [(1, 2)]
    rows = _build_rows(inputs, 100)
    assert [(row.numbers, row.length) for row in rows] == [([0, 1, 2, 3], 7), ([4], 2)]


def test_questions_after_the_same_examples_read_them_once() -> None:
    shots = tuple(range(30))
    inputs = [(*shots, 90 + q, *choice) for q in range(3) for choice in ((1, 2), (3, 4), (5,))]
    rows = _build_rows(inputs, 100)
    assert len(rows) == 1 and rows[0].shared == 30
    assert rows[0].length == 30 + 3 * (3 + 3 + 2)
    assert max(len(row.numbers) for row in _build_rows(inputs, 4)) <= 4
    # they differ after the first token: too little for packing
    assert len(_build_rows([(7, *range(20)), (7, *range(5, 25))], 100)) == 2


def test_models_of_other_shapes_share_contexts_too(tiny_of: Callable[..., Gpt]) -> None:
    """Learned positions end at 16 although a row is longer; a document mask forbids packing."""
    for more in ({"positions": "learned", "n_positions": 16}, {"document_mask": True, "eod_id": 9}):
        model = tiny_of(n_tokens=40, **more)
        scores = score_requests(score_autoregressive, model, max_length=16, batch_size=9)
        expected = [by_hand(model, request, 16)[0] for request in REQUESTS]
        assert scores.log_p == pytest.approx(expected, abs=1e-4)


def test_a_continuation_longer_than_the_model_is_refused(tiny: Gpt) -> None:
    for score, n in ((score_autoregressive, 3), (score_left_to_right, 4)):
        with pytest.raises(ValueError, match="a continuation of 4 tokens leaves no room"):
            score_requests(score, tiny, max_length=n)


def test_left_to_right_no_later_token_of_the_answer_is_visible(tiny: Gpt) -> None:
    """Each token has its own forward pass, with itself and all later ones masked; for any batch size."""
    expected = []
    for request in REQUESTS:
        log_p, n = 0.0, len(request.continuation)
        for i, token in enumerate(request.continuation):
            tokens = [*request.context, *request.continuation[:i], *[40] * (n - i)]
            log_p += float(log_softmax(tiny, tokens, causal=False)[len(request.context) + i][token])
        expected.append(log_p)
    for batch_size in (1, 5, 64):
        scores = score_requests(score_left_to_right, tiny, batch_size=batch_size)
        assert scores.log_p == pytest.approx(expected, abs=1e-4)


def masks_of(n: int) -> list[tuple[int, ...]]:
    return [mask for size in range(1, n + 1) for mask in combinations(range(n), size)]


def bound_by_enumeration(model: Gpt, request: Request) -> float:
    """Compute the bound: sum over l of 1/L, over masks of l tokens of 1/C(L, l), of L/l times their log p."""
    n, total = len(request.continuation), 0.0
    for mask in masks_of(n):
        shown = [40 if i in mask else token for i, token in enumerate(request.continuation)]
        log_p = log_softmax(model, [*request.context, *shown], causal=False)
        log_likelihood = sum(float(log_p[len(request.context) + i][request.continuation[i]]) for i in mask)
        total += log_likelihood / len(mask) / math.comb(n, len(mask))
    return total


def test_the_bound_is_exact_for_short_answers_and_unbiased_for_others(tiny: Gpt) -> None:
    expected = np.array([bound_by_enumeration(tiny, request) for request in REQUESTS])
    # 2^4 - 1 masks of the longest answer
    exact = score_requests(score_bound, tiny, num_mc=15, seed=0, batch_size=7)
    assert exact.log_p == pytest.approx(expected, abs=1e-4)
    draw = lambda seed: score_requests(score_bound, tiny, num_mc=14, seed=seed, batch_size=64)  # noqa: E731
    estimates = np.array([draw(seed).log_p for seed in range(40)])
    error = estimates.std(axis=0, ddof=1) / math.sqrt(len(estimates))
    long = np.array([len(request.continuation) == 4 for request in REQUESTS])
    assert (error[long] > 0).all() and error[~long] == pytest.approx(0, abs=1e-5)
    assert (np.abs(estimates.mean(axis=0) - expected)[long] < 4 * error[long]).all()


def test_masks_hide_each_number_of_tokens_equally_often() -> None:
    """Exactly equally often if the number of masks is a multiple of the length: t is stratified."""
    hidden, weights = draw_answer_masks(6, 60, seed=0, number=3)
    assert np.bincount(hidden.sum(axis=1), minlength=7)[1:].tolist() == [10] * 6
    assert weights == pytest.approx(6 / hidden.sum(axis=1) / 60)
    again, _ = draw_answer_masks(6, 60, seed=0, number=3)
    other, _ = draw_answer_masks(6, 60, seed=0, number=4)
    assert (hidden == again).all() and (hidden != other).any()
    shares = np.mean([draw_answer_masks(6, 60, 0, number)[0].mean(axis=0) for number in range(200)], axis=0)
    assert shares == pytest.approx(np.full(6, 3.5 / 6), abs=0.01)


def test_greedy_decoding_flags_the_answers_that_the_model_generates(tiny: Gpt) -> None:
    prompts = [QUESTION, (2, 7), (1,)]
    right = []
    for prompt in prompts:
        tokens = [*prompt, 40, 40, 40]
        for _ in range(3):
            # [MASK] and padding are never sampled
            chances = tiny(torch.tensor([tokens]), causal=False)[0, :, :40].double().softmax(-1)
            masked_places = [p for p, token in enumerate(tokens) if token == 40]
            place = max(masked_places, key=lambda p: float(chances[p].max()))
            tokens[place] = int(chances[place].argmax())
        right.append(Request(tuple(prompt), tuple(tokens[len(prompt) :])))
    wrong = [Request(r.context, ((r.continuation[0] + 1) % 40, *r.continuation[1:])) for r in right]
    scores = decode_greedily(tiny, right + wrong, batch_size=2, max_length=64, world=ALONE)
    assert scores.greedy.tolist() == [True] * 3 + [False] * 3
    assert np.isnan(scores.log_p).all()
