"""llama2.c's trained model of 260,032 parameters and its tokenizer, as tests use them."""

from pathlib import Path

import pytest

from megatron.generation.generate import generate
from megatron.generation.sampling import Sampling
from megatron.plan.count import n_params
from megatron.tokenizer.bpe import load_hf_tokenizer
from tests.checkpoint.llama2c import read_llama2c

# the output of llama2.c's run.c for `stories260K.bin -z tok512.bin -t 0 -n 64 -i "Once upon a time"`
# (published by ports of it, whose tests use it)
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, "
    "she saw a big, red ball. She wanted to play with it, but it was too high.\nLily"
)


@pytest.fixture(scope="module")
def folder(scaling_data: Path) -> Path:
    return scaling_data / "stories260K"


def test_greedy_text_equals_that_of_llama2c(folder: Path, stories_folder: Path) -> None:
    weights = read_llama2c(folder / "stories260K.bin")
    model, tokenizer = weights.build_model(), load_hf_tokenizer(str(stories_folder))
    assert n_params(weights.config) == sum(p.numel() for p in model.parameters()) == 260_032
    prompt = [tokenizer.bos_id, *tokenizer.encode("Once upon a time")]
    sampling = Sampling(temperature=0)
    # run.c counts <s> and the prompt among its 64 positions
    new = generate(model, [prompt], max_new_tokens=64 - len(prompt) + 1, sampling=sampling)[0]
    assert tokenizer.decode([*prompt[1:], *new]) == STORY
