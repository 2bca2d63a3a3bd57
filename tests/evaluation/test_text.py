"""Text in, text out, with a really trained model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.checkpoint.convert import read_any
from megatron.checkpoint.weights import Weights
from megatron.evaluation import text as text_module
from megatron.evaluation.sampling import Sampling
from megatron.evaluation.text import Writer
from megatron.model.gpt import Gpt

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def story_weights(scaling_data: Path) -> Weights:
    folder = scaling_data / "stories260K"
    return read_any(folder / "stories260K.bin", tokenizer=str(folder / "tok512.bin"))


def test_a_story_goes_on_in_english_and_ends_where_the_next_begins(story_weights: Weights) -> None:
    writer = Writer(story_weights)
    prompts = ["Once upon a time", "One day, a dog"]
    told = writer.write(prompts, 400, GREEDY)
    assert told[0].startswith(", there was a little girl named Lily. She loved to play outside in the park.")
    for text in told:
        assert "<s>" not in text
        assert text.rstrip().rstrip('"').endswith(".")  # it came to an end by itself
    n_tokens = [len(writer.tokenizer.encode(text)) for text in told]
    assert max(n_tokens) < 390
    writer.ignore_end = True
    shorter = min(told, key=len)
    prompt = prompts[told.index(shorter)]
    longer = writer.write([prompt], min(n_tokens) + 20, GREEDY)[0]
    assert longer.startswith(shorter) and len(longer) > len(shorter)


def test_a_stream_is_the_text_in_pieces(story_weights: Weights) -> None:
    writer = Writer(story_weights)
    how = Sampling(temperature=0.9, top_p=0.95, seed=4)
    pieces = list(writer.stream(["Tim had a"], 60, how))
    assert len(pieces) > 40
    assert "".join(pieces) == "Tim had a" + writer.write(["Tim had a"], 60, how)[0]
    for prompts in (["a", "b"], []):
        with pytest.raises(ValueError, match="one prompt"):
            next(writer.stream(prompts, 5, how))


def test_no_prompt_begins_a_document(story_weights: Weights) -> None:
    assert Writer(story_weights).ids("") == [1]
    assert Writer(story_weights).write([""], 12, GREEDY)[0].startswith("Once upon a time")


def test_a_diffusion_model_fills_in_text(
    tiny_of: Callable[..., Gpt], scaling_data: Path, story_weights: Weights
) -> None:
    model = tiny_of(n_tokens=512)
    weights = replace(
        story_weights, config=model.config, objective="masked_diffusion", state=model.state_dict()
    )
    writer = Writer(weights, ignore_end=True)
    told = writer.write(["The", "A dog"], 8, GREEDY, n_steps=4, order="random", block_tokens=4)
    assert told == writer.write(["The", "A dog"], 8, GREEDY, n_steps=4, order="random", block_tokens=4)
    assert all(told)
    with pytest.raises(ValueError, match="autoregressive model"):
        next(writer.stream(["The"], 4, GREEDY))


def test_a_model_without_its_own_tokenizer_is_refused(tiny: Gpt, story_weights: Weights) -> None:
    with pytest.raises(ValueError, match="name it with --tokenizer"):
        Writer(replace(story_weights, tokenizer=None))
    small = replace(story_weights, config=tiny.config, state=tiny.state_dict())
    with pytest.raises(ValueError, match="has 512 ids, the model knows 40"):
        Writer(small)


@pytest.mark.parametrize(("prompt", "n_new", "passes"), [("One day", 0, 0), ("One day", 1, 1), ("One", 1, 0)])
def test_text_past_the_trained_positions_is_warned_of_once(
    story_weights: Weights, monkeypatch: pytest.MonkeyPatch, prompt: str, n_new: int, passes: int
) -> None:
    """The last new token is not read: n tokens of a prompt and m new ones fill n + m - 1 positions."""
    told: list[str] = []
    monkeypatch.setattr(text_module.log, "warning", lambda words, *more: told.append(words % more))
    writer = Writer(story_weights)
    n_read = len(writer.ids("One day"))
    monkeypatch.setattr(writer, "weights", replace(writer.weights, seq_len=n_read - (n_new > 0)))
    writer.write([prompt, prompt], n_new, GREEDY)
    "".join(writer.stream([prompt], n_new, GREEDY)) if n_new else None
    assert len(told) == passes * 2  # of each call
    for one in told:
        assert one.startswith(f"--max-new-tokens: got {n_read + n_new - 1} positions")
        assert f"was trained on {n_read - 1}" in one
