"""Generation by unmasking, compared with explicit loops and with enumeration."""

from collections.abc import Callable
from itertools import permutations, product

import pytest
import torch

from megatron.generation.generate_diffusion import generate_diffusion
from megatron.generation.sampling import Sampling
from megatron.model.transformer import Gpt
from tests.generation.conftest import assert_frequencies

GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 1, 4], [9, 2, 6], [5]]


def by_hand(model: Gpt, prompt: list[int], n: int, order: str, settle: list[tuple[range, int]]) -> list[int]:
    """Continue one prompt greedily: at each step unmask `count` positions of a block."""
    mask = model.config.n_tokens
    tokens = prompt + [mask] * n
    for block, count in settle:
        logits = model(torch.tensor([tokens]), causal=False)[0, :, :mask]
        chances = logits.softmax(-1).max(-1)
        hidden = [len(prompt) + i for i in block if tokens[len(prompt) + i] == mask]
        if order == "confidence":
            hidden.sort(key=lambda p: -float(chances.values[p]))
        for position in hidden[:count]:
            tokens[position] = int(chances.indices[position])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("order", ["confidence", "left_to_right"])
def test_tokens_equal_those_of_an_explicit_loop(tiny: Gpt, order: str) -> None:
    # 12 tokens: one at a time, and in 5 steps of 2, 2, 3, 2, 3
    for counts in ([1] * 12, [2, 2, 3, 2, 3]):
        settle = [(range(12), count) for count in counts]
        expected = [by_hand(tiny, prompt, 12, order, settle) for prompt in PROMPTS]
        options = {"n_new_tokens": 12, "n_steps": len(counts), "order": order, "sampling": GREEDY}
        assert generate_diffusion(tiny, PROMPTS, **options) == expected


def test_blocks_are_unmasked_from_left_to_right(tiny: Gpt) -> None:
    # 10 tokens in blocks of 4, 4, 2 with 5 steps: 2, 2 and 1 of them
    settle = [(range(4), 2), (range(4), 2), (range(4, 8), 2), (range(4, 8), 2), (range(8, 10), 2)]
    expected = [by_hand(tiny, prompt, 10, "confidence", settle) for prompt in PROMPTS]
    generated = generate_diffusion(tiny, PROMPTS, n_new_tokens=10, n_steps=5, block_tokens=4, sampling=GREEDY)
    assert generated == expected
    whole = generate_diffusion(tiny, PROMPTS, n_new_tokens=10, n_steps=5, sampling=GREEDY)
    assert whole != generated
    # blocks of one token are unmasked left to right, for any order within a block
    options = {"n_new_tokens": 8, "n_steps": 8, "sampling": GREEDY}
    left = generate_diffusion(tiny, PROMPTS, order="left_to_right", **options)
    assert generate_diffusion(tiny, PROMPTS, order="random", block_tokens=1, **options) == left


@pytest.mark.parametrize("order", ["random", "left_to_right"])
def test_pairs_have_the_probabilities_of_the_model(tiny_of: Callable[..., Gpt], order: str) -> None:
    """Probability of a pair: the product of the conditional ones, averaged over the orders."""
    model = tiny_of(n_tokens=4, sharpness=10.0)

    def chances(tokens: list[int], position: int) -> list[float]:
        logits = model(torch.tensor([[1, *tokens]]), causal=False)[0, 1 + position, :4]
        return logits.double().softmax(-1).tolist()

    orders = list(permutations(range(2))) if order == "random" else [(0, 1)]
    expected = dict.fromkeys(product(range(4), repeat=2), 0.0)
    for pair in expected:
        for first, second in orders:
            tokens = [4, 4]
            chance = chances(tokens, first)[pair[first]]
            tokens[first] = pair[first]
            expected[pair] += chance * chances(tokens, second)[pair[second]] / len(orders)
    assert sum(expected.values()) == pytest.approx(1)
    sampling = Sampling(temperature=1, seed=3)
    generated = generate_diffusion(
        model, [[1]] * 4000, n_new_tokens=2, n_steps=2, order=order, sampling=sampling
    )
    assert_frequencies(generated, expected)


@pytest.mark.parametrize("order", ["confidence", "random", "left_to_right"])
def test_samples_are_reproducible_with_the_seed_for_any_batch(tiny: Gpt, order: str) -> None:
    def run(prompts: list[list[int]], seed: int) -> list[list[int]]:
        sampling = Sampling(temperature=1.3, top_p=0.95, seed=seed)
        return generate_diffusion(tiny, prompts, n_new_tokens=8, n_steps=4, order=order, sampling=sampling)

    samples = run(PROMPTS, 0)
    assert samples == run(PROMPTS, 0)
    assert samples[:1] == run(PROMPTS[:1], 0)
    assert samples != run(PROMPTS, 1)
    assert all(0 <= token < 40 for tokens in samples for token in tokens)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"n_steps": 5}, "n_steps: got 5, expected 1 to 4"),
        ({"n_steps": 0}, "n_steps: got 0"),
        ({"order": "best"}, "order: got 'best'"),
        ({"block_tokens": 0}, "block_tokens: got 0"),
    ],
)
def test_invalid_settings_are_refused(tiny: Gpt, setting: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        generate_diffusion(tiny, PROMPTS, **{"n_new_tokens": 4, "n_steps": 4, "sampling": GREEDY, **setting})
