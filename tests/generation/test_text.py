"""Text generation with a trained model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.model_weights import Weights
from megatron.generation import completions as text_module
from megatron.generation.completions import TextGenerator
from megatron.generation.sampling import Sampling
from megatron.model.transformer import Gpt

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def story_weights(stories_folder: Path) -> Weights:
    return read_any(stories_folder)


def test_a_story_is_continued_in_english_and_ends_at_the_next_document(story_weights: Weights) -> None:
    writer = TextGenerator(story_weights)
    prompts = ["Once upon a time", "One day, a dog"]
    texts = writer.write(prompts, 400, GREEDY)
    assert texts[0].startswith(", there was a little girl named Lily. She loved to play outside in the park.")
    for text in texts:
        assert "<s>" not in text
        assert text.rstrip().rstrip('"').endswith(".")  # the model ended the document
    n_tokens = [len(writer.tokenizer.encode(text)) for text in texts]
    assert max(n_tokens) < 390
    writer.ignore_end = True
    shorter = min(texts, key=len)
    prompt = prompts[texts.index(shorter)]
    longer = writer.write([prompt], min(n_tokens) + 20, GREEDY)[0]
    assert longer.startswith(shorter) and len(longer) > len(shorter)


def test_the_pieces_of_a_stream_are_the_whole_text(story_weights: Weights) -> None:
    writer = TextGenerator(story_weights)
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=4)
    pieces = list(writer.stream_text(["Tim had a"], 60, sampling))
    assert len(pieces) > 40
    assert "".join(pieces) == "Tim had a" + writer.write(["Tim had a"], 60, sampling)[0]
    for prompts in (["a", "b"], []):
        with pytest.raises(ValueError, match="expected one prompt"):
            next(writer.stream_text(prompts, 5, sampling))


def test_an_empty_prompt_begins_a_document(story_weights: Weights) -> None:
    assert TextGenerator(story_weights).encode_prompt("") == [1]
    assert TextGenerator(story_weights).write([""], 12, GREEDY)[0].startswith("Once upon a time")


def test_a_diffusion_model_generates_text(tiny_of: Callable[..., Gpt], story_weights: Weights) -> None:
    model = tiny_of(n_tokens=512)
    changes = {"config": model.config, "objective": "masked_diffusion", "state": model.state_dict()}
    writer = TextGenerator(replace(story_weights, **changes), ignore_end=True)
    options = {"n_steps": 4, "order": "random", "block_tokens": 4}
    texts = writer.write(["The", "A dog"], 8, GREEDY, **options)
    assert texts == writer.write(["The", "A dog"], 8, GREEDY, **options)
    assert all(texts)
    with pytest.raises(ValueError, match="and an autoregressive model"):
        next(writer.stream_text(["The"], 4, GREEDY))


def test_a_model_without_its_own_tokenizer_is_refused(tiny: Gpt, story_weights: Weights) -> None:
    with pytest.raises(ValueError, match="give it with --tokenizer"):
        TextGenerator(replace(story_weights, tokenizer=None))
    small = replace(story_weights, config=tiny.config, state=tiny.state_dict())
    with pytest.raises(ValueError, match="got 512 ids, expected at most 40"):
        TextGenerator(small)


@pytest.mark.parametrize(("prompt", "n_new", "passes"), [("One day", 0, 0), ("One day", 1, 1), ("One", 1, 0)])
def test_text_past_the_trained_positions_is_warned_of_once(
    story_weights: Weights, monkeypatch: pytest.MonkeyPatch, prompt: str, n_new: int, passes: int
) -> None:
    """The last new token is not read: n prompt tokens and m new ones need n + m - 1 positions."""
    warnings: list[str] = []
    monkeypatch.setattr(text_module.log, "warning", lambda words, *more: warnings.append(words % more))
    writer = TextGenerator(story_weights)
    n_read = len(writer.encode_prompt("One day"))
    monkeypatch.setattr(writer, "weights", replace(writer.weights, seq_len=n_read - (n_new > 0)))
    writer.write([prompt, prompt], n_new, GREEDY)
    "".join(writer.stream_text([prompt], n_new, GREEDY)) if n_new else None
    assert len(warnings) == passes * 2  # one per call
    for warning in warnings:
        assert warning.startswith(f"--max-new-tokens: got {n_read + n_new - 1} positions")
        assert f"was trained on {n_read - 1}" in warning
