"""Autoregressive generation, compared with full forward passes for every token."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch

from megatron.config.schema import ModelConfig
from megatron.generation.generate import generate, stream_tokens
from megatron.generation.sampling import Sampling, sample_tokens
from megatron.model.kv_cache import KvCache
from megatron.model.transformer import Gpt
from tests.generation.conftest import assert_frequencies

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3]]
GREEDY = Sampling(temperature=0)


def greedy_without_cache(model: Gpt, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        logits = model(torch.tensor([tokens]), causal=True)[0, -1, : model.config.n_tokens]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_prompts_of_different_lengths_are_continued_as_alone_and_without_a_cache(tiny: Gpt) -> None:
    expected = [greedy_without_cache(tiny, prompt, 12) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 10  # the texts are not repetitive
    assert generate(tiny, PROMPTS, max_new_tokens=12, sampling=GREEDY) == expected
    assert [generate(tiny, [p], max_new_tokens=12, sampling=GREEDY)[0] for p in PROMPTS] == expected


def test_tokens_are_yielded_one_by_one(tiny: Gpt) -> None:
    steps = stream_tokens(tiny, PROMPTS[:2], max_new_tokens=4, sampling=GREEDY)
    first = next(steps)
    assert first[0] is None and first[1] is not None  # the longer prompt is still read
    rest = list(steps)
    assert [step[0] is None for step in rest] == [True, True, True, False, False, False, False]
    assert [step[1] is None for step in rest] == [False, False, False, True, True, True, True]


def test_samples_are_reproducible_with_the_seed_for_any_batch(tiny: Gpt) -> None:
    sampling = Sampling(temperature=1.5, seed=5)
    samples = generate(tiny, PROMPTS, max_new_tokens=10, sampling=sampling)
    assert samples == generate(tiny, PROMPTS, max_new_tokens=10, sampling=sampling)
    assert samples[:2] == generate(tiny, PROMPTS[:2], max_new_tokens=10, sampling=sampling)
    assert samples != generate(tiny, PROMPTS, max_new_tokens=10, sampling=Sampling(temperature=1.5, seed=6))
    same = generate(tiny, [[3, 1]] * 4, max_new_tokens=10, sampling=sampling)
    assert len({tuple(tokens) for tokens in same}) > 1  # each index in the list has its own random numbers


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, None), (1.7, 3, None), (2.0, None, 0.8)]
)
def test_pairs_of_tokens_are_sampled_with_the_probabilities_of_the_model(
    tiny_of: Callable[..., Gpt], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    """Probabilities by enumeration of all pairs."""
    model = tiny_of(n_tokens=5, sharpness=15.0)

    def chances(tokens: list[int]) -> list[float]:
        logits = model(torch.tensor([tokens]), causal=True)[0, -1, :5].double()
        p = (logits / temperature).softmax(-1).tolist()
        likeliest = sorted(range(5), key=lambda i: -p[i])
        nucleus, reached = [], 0.0
        for i in likeliest[:top_k]:
            if top_p is None or reached < top_p:
                nucleus.append(i)
            reached += p[i]
        total = sum(p[i] for i in nucleus)
        return [p[i] / total if i in nucleus else 0.0 for i in range(5)]

    first = enumerate(chances([2]))
    expected = {(a, b): pa * pb for a, pa in first for b, pb in enumerate(chances([2, a]))}
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=1)
    assert_frequencies(generate(model, [[2]] * 4000, max_new_tokens=2, sampling=sampling), expected)


def test_the_sampled_token_is_where_the_cumulative_probability_exceeds_the_number() -> None:
    logits = torch.tensor([0.1, 0.2, 0.0, 0.7]).log().expand(5, 4)
    u = torch.tensor([0.0, 0.0999, 0.1001, 0.2999, 0.3001], dtype=torch.float64)
    assert sample_tokens(logits, u, Sampling()).tolist() == [0, 0, 1, 1, 3]
    nearly_one = torch.tensor([1 - 2**-24], dtype=torch.float64)
    assert sample_tokens(torch.tensor([[0.5, 0.5, 0.0]]).log(), nearly_one, Sampling()).tolist() == [1]


def test_invalid_sampling_settings_and_prompts_are_refused(tiny: Gpt) -> None:
    for name, values in {"temperature": (-1.0, float("nan")), "top_k": (0,), "top_p": (0.0, 1.5)}.items():
        for value in values:
            with pytest.raises(ValueError, match="expected"):
                Sampling(**{name: value})
    for prompts in ([], [[1], []], [[40]], [[-1]]):
        with pytest.raises(ValueError, match="prompt"):
            generate(tiny, prompts, max_new_tokens=1, sampling=GREEDY)


# another value of each key of a causal model
VARIED: dict[str, Any] = {
    "size": "7M", "d_model": 48, "d_ff": 96, "d_head": 16, "n_heads": 2, "n_layers": 3, "n_tokens": 30,
    "vocab_rows": 64, "vocab_multiple": 16, "rope_theta": 100.0, "norm_eps": 0.1, "n_kv_heads": 1,
    "norm": "layernorm", "feed_forward": "gelu", "positions": "learned", "n_positions": 24, "biases": True,
    "tied_embedding": False, "qk_norm": True, "document_mask": True, "eod_id": 38, "attention_dropout": 0.5,
    "hidden_dropout": 0.5, "init_std": 0.03, "parametrization": "mup", "base_d_model": 16,
    "base_n_layers": 1, "base_d_head": 4, "qkv_biases": True, "qk_norm_all_heads": True,
    "norm_placement": "output", "parallel_residual": True, "attention_window": 3, "rotary_dims": 4,
    "rope_scaling": "linear", "rope_factor": 5.0, "rope_low_factor": 0.5, "rope_high_factor": 2.0,
    "rope_original_positions": 4, "head_bias": True,
}  # fmt: skip
LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original_positions": 8}
# the keys that a key requires
REQUIRED: dict[str, dict[str, Any]] = {
    "positions": {"n_positions": 20}, "n_positions": {"positions": "learned"},
    "biases": {"norm": "layernorm"}, "document_mask": {"eod_id": 39}, "eod_id": {"document_mask": True},
    "parametrization": {"base_d_model": 8}, "base_d_model": {"parametrization": "mup"},
    "base_n_layers": {"parametrization": "completep", "base_d_model": 16},
    "base_d_head": {"parametrization": "mup", "base_d_model": 16}, "qk_norm_all_heads": {"qk_norm": True},
    "rope_scaling": {"rope_factor": 3.0}, "rope_factor": {"rope_scaling": "linear"},
    "rope_low_factor": LLAMA3, "rope_high_factor": LLAMA3, "rope_original_positions": LLAMA3,
    "head_bias": {"tied_embedding": False},
}  # fmt: skip


@pytest.mark.parametrize(
    "key", [f.name for f in fields(ModelConfig) if "masked_diff" not in f.metadata["needs"]]
)
def test_cached_logits_equal_full_ones_with_every_key_of_a_model(
    tiny_of: Callable[..., Gpt], key: str
) -> None:
    """A new key fails here until it has a value in VARIED."""
    more = REQUIRED.get(key, {}) | {key: VARIED[key]}
    model = tiny_of(**{"n_tokens": 40, "vocab_rows": 48} | more)
    assert getattr(model.config, key) != getattr(tiny_of(n_tokens=40).config, key)
    assert not model.training
    tokens = torch.randint(0, 30, (2, 20), generator=torch.Generator().manual_seed(1))
    cache = KvCache(model.config, 2, 20, tokens.device)
    parts = [
        model.compute_logits(model.hidden_states(part, causal=True, cache=cache))
        for part in tokens.split([7, 1, 1, 5, 6], dim=1)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens, causal=True), rtol=1e-4, atol=1e-4)
    assert cache.n_read == 20


def test_an_end_of_document_stops_a_model_that_masks_documents(tiny_of: Callable[..., Gpt]) -> None:
    model = tiny_of(n_tokens=40, document_mask=True, eod_id=7)
    expected = [greedy_without_cache(model, prompt, 8) for prompt in PROMPTS[:2]]
    cut = [tokens[: tokens.index(7) + 1] if 7 in tokens else tokens for tokens in expected]
    assert generate(model, PROMPTS[:2], max_new_tokens=8, sampling=GREEDY) == cut
    with pytest.raises(ValueError, match="after an end of document"):
        generate(model, [[7, 3]], max_new_tokens=1, sampling=GREEDY)
    learned = tiny_of(n_tokens=40, positions="learned", n_positions=16)
    with pytest.raises(ValueError, match="got 17 positions, expected at most the 16 learned ones"):
        generate(learned, [[1] * 9], max_new_tokens=8, sampling=GREEDY)
