"""llama2.c's trained model of 260,032 parameters: read, run and written again."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.convert.llama2c import (
    deinterleave_rows,
    interleave_rows,
    read_llama2c,
    write_llama2c,
)
from megatron.generation.generate import generate
from megatron.generation.sampling import Sampling
from megatron.plan.count import n_params
from megatron.tokenizer.llama2c_tokenizer import Llama2cTokenizer

# the output of llama2.c's run.c for `stories260K.bin -z tok512.bin -t 0 -n 64 -i "Once upon a time"`
# (published by ports of it, whose tests use it)
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, "
    "she saw a big, red ball. She wanted to play with it, but it was too high.\nLily"
)
# children's stories written for this test, in the style of TinyStories, the training data of the model
STORIES = (
    "Once upon a time, there was a little boy named Tim. Tim had a red ball. He liked to play with his ball "
    "in the park. One day, the ball rolled under a big tree. Tim was sad. He asked his mom to help him. Mom "
    "found the ball and gave it to Tim. Tim was very happy. They went home and had dinner.",
    "One day, a girl named Sue went for a walk with her dog. The dog saw a cat and started to run. Sue "
    'said, "Stop! Come back!" The dog did not stop. It ran and ran. Then the cat went up a tree. Sue hugged '
    "her dog and they went home. The dog was tired and went to sleep.",
    "There was a small bird who lived in a nest. The bird wanted to fly, but it was too scared. Its mom "
    'said, "You can do it. Just try." The bird was brave and jumped. It flew high in the sky. The bird was '
    "so happy. It flew with its friends all day.",
)


@pytest.fixture(scope="module")
def folder(scaling_data: Path) -> Path:
    return scaling_data / "stories260K"


def test_greedy_text_equals_that_of_llama2c(folder: Path) -> None:
    model = read_llama2c(folder / "stories260K.bin").build_model()
    tokenizer = Llama2cTokenizer(folder / "tok512.bin")
    prompt = [tokenizer.bos_id, *tokenizer.encode("Once upon a time")]
    sampling = Sampling(temperature=0)
    # run.c counts <s> and the prompt among its 64 positions
    new = generate(model, [prompt], max_new_tokens=64 - len(prompt) + 1, sampling=sampling)[0]
    assert tokenizer.decode([*prompt[1:], *new]) == STORY


def test_loss_on_childrens_stories_is_near_the_published_one(folder: Path) -> None:
    """Published: 1.297 nats per token on the validation split of TinyStories, in whole windows of 512.

    The stories here are shorter, which raises the loss, and simpler, which lowers it. The tolerance is
    therefore 0.2 nats. An untrained model has log 512 = 6.24.
    """
    model = read_llama2c(folder / "stories260K.bin").build_model()
    tokenizer = Llama2cTokenizer(folder / "tok512.bin")
    nats, count = 0.0, 0
    for story in STORIES:
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(story)]])
        logits = model(ids[:, :-1], causal=True)
        nats += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    assert count > 250
    assert nats / count == pytest.approx(1.297, abs=0.2)


def test_a_model_written_again_is_the_same_file(folder: Path, tmp_path: Path) -> None:
    weights = read_llama2c(folder / "stories260K.bin")
    assert n_params(weights.config) == sum(p.numel() for p in weights.build_model().parameters()) == 260_032
    write_llama2c(weights, tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == (folder / "stories260K.bin").read_bytes()
    with pytest.raises(ValueError, match="already exists"):
        write_llama2c(weights, tmp_path / "again.bin")


def test_rows_of_rotated_pairs_are_reordered_to_rotated_halves() -> None:
    """One head with d_head 4: the rotated pairs are rows (0, 1) and (2, 3); as halves (0, 2) and (1, 3)."""
    rows = torch.arange(8.0).reshape(4, 2)
    assert deinterleave_rows(rows, 4)[:, 0].tolist() == [0, 4, 2, 6]
    assert torch.equal(interleave_rows(deinterleave_rows(rows, 4), 4), rows)


def test_an_invalid_file_is_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "stories260K.bin").read_bytes()
    for content, sentence in (
        (b"", "got 0 bytes, expected a llama2.c model"),
        (whole[:-4], "got 1,056,536 bytes, expected 1,056,540 by its header"),
        (bytes(64), "not a llama2.c model"),
        (whole[:20] + b"\x00\xfe\xff\xff" + whole[24:], "got a separate head matrix"),
    ):
        (tmp_path / "bad.bin").write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            read_llama2c(tmp_path / "bad.bin")
    with pytest.raises(FileNotFoundError):
        read_llama2c(tmp_path / "none.bin")
