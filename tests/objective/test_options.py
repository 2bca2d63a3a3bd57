"""Options of the objectives: their loss against an exact enumeration of all draws."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.config.schema import ModelConfig
from megatron.model.initialization import init_weights
from megatron.model.transformer import Gpt
from megatron.objective.autoregressive import Autoregressive, build_orders
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.sample_noise import draw_training_noise, stratify_groups
from megatron.objective.task import Task, compute_sample_nats

MASK = 4  # ids 0..3, then [MASK]
RATE_MIN = 1e-3
PLAIN = MaskedDiffusion(MASK, RATE_MIN, seed=1, t_group=16)
TEXT = np.array([[2, 0, 3, 1]])
MASKS = list(itertools.product([False, True], repeat=3))


def mean_over(t_of: Callable[[float], float], expected: Callable[[float], float]) -> float:
    """Return the mean of expected(rate) over t ~ U(0, 1), by Simpson's rule."""
    knots = [expected((1 - RATE_MIN) * t_of(t) + RATE_MIN) for t in np.linspace(0, 1, 201)]
    return (knots[0] + knots[-1] + 4 * sum(knots[1:-1:2]) + 2 * sum(knots[2:-1:2])) / 600


def mask_probability(mask: tuple[bool, ...], rate: float) -> float:
    return math.prod(rate if hidden else 1 - rate for hidden in mask)


def move_to_end(mask: tuple[bool, ...]) -> tuple[bool, ...]:
    return tuple(i >= 3 - sum(mask) for i in range(3))


@pytest.fixture(scope="module")
def nats_of_mask() -> dict[tuple[bool, ...], float]:
    """Random table as a model of three positions: the cross-entropy of the masked tokens of each mask."""
    generator = torch.Generator().manual_seed(0)
    nats = {}
    for mask in MASKS:
        log_p = torch.randn(3, MASK + 1, generator=generator, dtype=torch.float64).log_softmax(-1)
        of_tokens = log_p[torch.arange(3), torch.from_numpy(TEXT[0, :3])]
        nats[mask] = -(of_tokens * torch.tensor(mask)).sum().item()
    return nats


@pytest.mark.parametrize(
    ("objective", "ar_ratio", "highest_t"),
    [
        (PLAIN, 0.0, 1.0),
        (replace(PLAIN, t_draw="antithetic"), 0.0, 1.0),
        (replace(PLAIN, t_draw="stratified"), 0.0, 1.0),
        (replace(PLAIN, ar_ratio=0.3), 0.3, 1.0),
        (replace(PLAIN, ar_ratio=1.0, t_draw="stratified"), 1.0, 1.0),
        (replace(PLAIN, low_noise_start=0.4, low_noise_samples=10**6), 0.0, 0.4),
    ],
    ids=["independent", "antithetic", "stratified", "ar_ratio", "all_left_to_right", "low_noise_start"],
)
def test_the_training_loss_has_its_exact_mean_under_every_option(
    objective: MaskedDiffusion, ar_ratio: float, highest_t: float, nats_of_mask: dict[tuple[bool, ...], float]
) -> None:
    def compute_mean(rate: float) -> float:
        scattered = sum(mask_probability(mask, rate) * nats_of_mask[mask] for mask in MASKS)
        moved = sum(mask_probability(mask, rate) * nats_of_mask[move_to_end(mask)] for mask in MASKS)
        return ((1 - ar_ratio) * scattered + ar_ratio * moved) / rate

    exact = mean_over(lambda t: highest_t * t, compute_mean)
    n = 10_000
    task = objective.corrupt(np.repeat(TEXT, n, axis=0), np.arange(n))
    masks = (task.inputs == MASK).numpy()
    weight = np.zeros(n)
    # a sample without masked tokens has loss 0
    weight[(task.positions // 3).numpy()] = task.scale.double().numpy()
    draws = weight * np.array([nats_of_mask[tuple(mask)] for mask in masks.tolist()])
    error = draws.std() / math.sqrt(n)
    assert abs(draws.mean() - exact) < 4 * error
    assert error < 0.04 * exact


def test_spreading_t_keeps_its_distribution_and_lowers_the_variance_of_a_batch() -> None:
    group, n = 16, 16_000
    numbers = np.arange(n)
    draws = draw_training_noise(1, numbers, 0)[0]
    spread = {
        kind: replace(PLAIN, t_draw=kind)._spread_t(draws, numbers)
        for kind in ("independent", "antithetic", "stratified")
    }
    variance = {}
    for kind, t in spread.items():
        # Kolmogorov-Smirnov bound at the 1 % level for independent draws; spread draws are closer
        assert np.abs(np.sort(t) - (numbers + 0.5) / n).max() < 1.63 / math.sqrt(n)
        cost = np.exp(t)  # models a loss that increases with the noise
        assert cost.mean() == pytest.approx(math.e - 1, abs=4 * cost.std() / math.sqrt(n))
        variance[kind] = cost.reshape(-1, group).mean(axis=1).var()
    # by hand: Var e^U = 0.2420; antithetic halves it and adds Cov(e^U, e^(1-U)) = e - (e - 1)^2 = -0.2342;
    # in a part of width w the variance is about w^2 / 12 E[e^2U], E = 3.1945
    assert variance["independent"] * group == pytest.approx(0.2420, rel=0.2)
    assert variance["antithetic"] * group == pytest.approx(0.2420 - 0.2342, rel=0.2)
    assert variance["stratified"] * group == pytest.approx(3.1945 / 12 / group**2, rel=0.2)


def test_samples_of_a_group_are_in_different_parts_with_equal_frequency() -> None:
    numbers = np.arange(8 * 500)
    t = stratify_groups(0, numbers, draw_training_noise(0, numbers, 0)[0], 8)
    parts = np.floor(8 * t).astype(int).reshape(-1, 8)
    np.testing.assert_array_equal(np.sort(parts, axis=1), np.tile(np.arange(8), (500, 1)))
    counts = np.stack([np.bincount(parts[:, i], minlength=8) for i in range(8)])
    assert np.abs(counts - 500 / 8).max() < 5 * math.sqrt(500 / 8)  # each sample is in each part as often


OPTIONS = [
    PLAIN,
    Autoregressive(),
    replace(PLAIN, t_draw="antithetic"),
    replace(PLAIN, t_draw="stratified"),
    replace(PLAIN, ar_ratio=0.5, low_noise_start=0.5, low_noise_samples=20, drops_attention=True),
    Autoregressive(orders=4, order_kind="random", drops_attention=True),
    Autoregressive(orders=4, order_kind="noise_sorted", randmask_ratio=0.5),
    Autoregressive(masked_input_ratio=0.5, mask_id=MASK),
]


def task_parts(task: Task) -> dict[str, torch.Tensor]:
    return {"inputs": task.inputs, "targets": task.targets} | task.model_kwargs


@pytest.mark.parametrize("objective", OPTIONS, ids=repr)
def test_corruption_does_not_depend_on_the_rank(objective: MaskedDiffusion | Autoregressive) -> None:
    """Four ranks have 8 rows each."""
    tokens = np.random.default_rng(0).integers(0, MASK, (32, 21))
    numbers = np.arange(16, 48)
    whole = objective.corrupt(tokens, numbers)
    for rank in range(4):
        part = slice(8 * rank, 8 * rank + 8)
        share = objective.corrupt(tokens[part], numbers[part])
        assert torch.equal(share.inputs, whole.inputs[part])
        for name, tensor in share.model_kwargs.items():
            assert torch.equal(tensor, whole.model_kwargs[name][part])
    again = objective.corrupt(tokens, numbers + 32)
    is_plain = objective == Autoregressive() or "visible" in whole.model_kwargs
    assert is_plain or not torch.equal(again.inputs, whole.inputs)
    for name, tensor in whole.model_kwargs.items():
        assert not torch.equal(tensor, again.model_kwargs[name])


@pytest.mark.parametrize("objective", [PLAIN, Autoregressive()], ids=repr)
def test_the_parts_of_context_ranks_are_the_whole_task(objective: MaskedDiffusion | Autoregressive) -> None:
    task = objective.corrupt(np.random.default_rng(0).integers(0, MASK, (5, 25)), np.arange(5))
    parts = [task.slice_positions(begin, begin + 8) for begin in (0, 8, 16)]
    assert torch.equal(torch.cat([part.inputs for part in parts], dim=1), task.inputs)
    pairs = set()
    for k, part in enumerate(parts):
        rows = torch.arange(5 * 8) if part.positions is None else part.positions
        at = rows // 8 * 24 + 8 * k + rows % 8  # sample and column in the whole
        pairs |= set(zip(at.tolist(), part.targets.flatten().tolist(), strict=True))
    rows = torch.arange(5 * 24) if task.positions is None else task.positions
    assert pairs == set(zip(rows.tolist(), task.targets.flatten().tolist(), strict=True))


@pytest.mark.parametrize("objective", OPTIONS, ids=repr)
def test_scores_are_of_plain_text_under_every_option(objective: MaskedDiffusion | Autoregressive) -> None:
    plain = Autoregressive() if isinstance(objective, Autoregressive) else PLAIN
    tokens = np.random.default_rng(0).integers(0, MASK, (5, 21))
    scored, expected = (o.corrupt(tokens, np.arange(5), draw=3) for o in (objective, plain))
    assert task_parts(scored).keys() == task_parts(expected).keys()
    for name, tensor in task_parts(scored).items():
        assert torch.equal(tensor, task_parts(expected)[name])


@pytest.mark.parametrize("objective", OPTIONS, ids=repr)
def test_a_uniform_model_costs_log_v_under_every_option(objective: MaskedDiffusion | Autoregressive) -> None:
    n, n_positions = 1500, 16
    task = objective.corrupt(np.random.default_rng(0).integers(0, MASK, (n, n_positions + 1)), np.arange(n))
    nats = compute_sample_nats(torch.zeros(n, n_positions, 2), torch.randn(MASK + 1, 2), task).sum().item()
    assert nats / task.count == pytest.approx(math.log(MASK + 1), rel=0.03)


def test_orders_are_permutations_that_begin_with_the_first_token() -> None:
    for kind in ("random", "noise_sorted"):
        orders = build_orders(3, 6, 33, kind, 0.1)
        np.testing.assert_array_equal(orders[0], np.arange(33))
        np.testing.assert_array_equal(np.sort(orders, axis=1), np.tile(np.arange(33), (6, 1)))
        assert (orders[:, 0] == 0).all()
        assert len(np.unique(orders, axis=0)) == 6
        # a longer list begins with the shorter one: adding orders changes no existing order
        np.testing.assert_array_equal(build_orders(3, 9, 33, kind, 0.1)[:6], orders)
    orders = [build_orders(0, 9, 500, "noise_sorted", noise)[1:, 1:] for noise in (1e-9, 0.01, 10)]
    moved = [np.abs(of - np.arange(1, 500)).mean() for of in orders]
    # 0; about noise * n * 2 / sqrt(pi) / sqrt(2) since neighbours move as well; n / 3 for a uniform order
    assert moved[0] == 0
    assert 2 < moved[1] < 10
    assert moved[2] == pytest.approx(500 / 3, rel=0.1)


@pytest.fixture(scope="module")
def model() -> Gpt:
    shape = ModelConfig(d_model=16, d_ff=32, d_head=8, n_heads=2, n_layers=1, n_tokens=MASK, vocab_rows=5)
    built = Gpt(shape).eval()
    init_weights(built, seed=0)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim > 1:
                parameter *= 20
    return built.requires_grad_(False)


def compute_nats(model: Gpt, task: Task) -> np.ndarray:
    hidden = model.hidden_states(task.inputs, True, **task.model_kwargs)
    return compute_sample_nats(hidden, model.head_weight, task).numpy()


def test_the_loss_over_orders_is_the_mean_of_their_chain_rules(model: Gpt) -> None:
    tokens = np.array([[1, 3, 0, 2, 2]])
    objective = Autoregressive(seed=5, orders=3)
    by_order = []
    for order in build_orders(5, 3, 5, "random", 0.1):
        total = 0.0
        for i in range(1, 5):  # token i of the order from those before it, at their text positions
            seen = torch.from_numpy(order[:i].copy())[None]
            logits = model(torch.from_numpy(tokens[:, order[:i]]), True, positions=seen)[0, -1]
            total -= logits.log_softmax(-1)[tokens[0, order[i]]].item()
        by_order.append(total)
    n = 3000
    draws = compute_nats(model, objective.corrupt(np.repeat(tokens, n, axis=0), np.arange(n)))
    assert {round(x, 4) for x in draws.tolist()} == {round(x, 4) for x in by_order}
    shares = [np.isclose(draws, nats, atol=1e-5).mean() for nats in by_order]
    assert np.abs(np.array(shares) - 1 / 3).max() < 5 * math.sqrt(2 / 9 / n)


def test_the_loss_under_random_masking_is_its_mean_over_every_view(model: Gpt) -> None:
    """Three positions and one block, so that the masks of different positions do not interact."""
    tokens, ratio = np.array([[1, 3, 0, 2]]), 0.6
    objective = Autoregressive(seed=2, randmask_ratio=ratio)
    mean, square = (mean_over(lambda t: t, lambda rate, k=k: rate**k) for k in (1, 2))
    exact = 0.0
    plain = Autoregressive().corrupt(tokens, np.zeros(1, dtype=int))
    for position in range(3):
        for hides in itertools.product([False, True], repeat=position):
            k = sum(hides)
            # probability that a selected position masks exactly these: E[rate^k (1 - rate)^(position - k)]
            of_picked = {0: 1.0, 1: mean if k else 1 - mean}.get(position)
            if of_picked is None:
                of_picked = (1 - 2 * mean + square, mean - square, square)[k]
            chance = ratio * of_picked + (1 - ratio) * (k == 0)
            visible = torch.ones(1, 3, 3, dtype=torch.bool)
            visible[0, position, :position] = ~torch.tensor(hides, dtype=torch.bool)
            logits = model(plain.inputs, True, visible=visible)[0, position]
            exact -= chance * logits.log_softmax(-1)[tokens[0, position + 1]].item()
    n = 6000
    task = objective.corrupt(np.repeat(tokens, n, axis=0), np.arange(n))
    assert task.model_kwargs["visible"].diagonal(dim1=1, dim2=2).all()
    draws = compute_nats(model, task)
    error = draws.std() / math.sqrt(n)
    assert abs(draws.mean() - exact) < 4 * error
    assert 0 < error < 0.02 * exact


def test_masked_inputs_have_the_stated_rates_and_plain_targets() -> None:
    n, width, ratio, rate = 4000, 65, 0.4, 0.6
    tokens = np.random.default_rng(0).integers(0, MASK, (n, width))
    objective = Autoregressive(seed=3, masked_input_ratio=ratio, masked_input_rate=rate, mask_id=MASK)
    task = objective.corrupt(tokens, np.arange(n))
    plain = Autoregressive(seed=3).corrupt(tokens, np.arange(n))
    hidden = (task.inputs == MASK).numpy()
    assert torch.equal(task.targets, plain.targets)
    assert torch.equal(task.inputs[~torch.from_numpy(hidden)], plain.inputs[~torch.from_numpy(hidden)])
    # no token of a selected sample is masked: the mean of (1 - x)^64 over x ~ U(0, rate), 64 inputs
    none = (1 - (1 - rate) ** width) / (width * rate)
    shown = (~hidden.any(axis=1)).mean()
    expected = (1 - ratio) + ratio * none
    assert abs(shown - expected) < 5 * math.sqrt(expected * (1 - expected) / n)
    # mean rate ratio * r / 2; the rate of a sample has variance E[x^2] - mean^2 between samples
    mean, square = ratio * rate / 2, ratio * rate**2 / 3
    assert abs(hidden.mean() - mean) < 5 * math.sqrt((square - mean**2 + mean / width) / n)
    scored = objective.corrupt(tokens, np.arange(n), draw=0)
    assert torch.equal(scored.inputs, plain.inputs)
    # a document mask is computed from the inputs: a hidden end would join two documents
    whole = replace(objective, boundary_id=1).corrupt(tokens, np.arange(n)).inputs
    ends = plain.inputs == 1
    assert ends.any() and torch.equal(whole[~ends], task.inputs[~ends]) and (whole[ends] == 1).all()


def test_low_noise_ends_after_its_samples_and_masking_at_the_end_keeps_the_count() -> None:
    tokens = np.random.default_rng(0).integers(0, MASK, (400, 65))
    numbers = np.arange(400)
    plain = (PLAIN.corrupt(tokens, numbers).inputs == MASK).double()
    low = replace(PLAIN, low_noise_start=0.25, low_noise_samples=200).corrupt(tokens, numbers)
    shares = (low.inputs == MASK).double().mean(1)
    assert shares[:200].mean().item() == pytest.approx(0.125, abs=0.02)
    assert torch.equal(shares[200:], plain[200:].mean(1))
    ends = (replace(PLAIN, ar_ratio=1.0).corrupt(tokens, numbers).inputs == MASK).double()
    assert torch.equal(ends.sum(1), plain.sum(1))
    assert (ends.diff(dim=1) >= 0).all()  # masked positions form a suffix, possibly empty
