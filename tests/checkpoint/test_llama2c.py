"""llama2.c's trained model of 260,032 parameters and its tokenizer, as tests use them."""

import json
from pathlib import Path

import pytest
import torch

from megatron.generation.generate import generate
from megatron.generation.sampling import Sampling
from megatron.plan.count import n_params
from megatron.tokenizer.bpe import load_hf_tokenizer
from tests.checkpoint.llama2c import deinterleave_rows, read_llama2c, read_pieces

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


def test_greedy_text_equals_that_of_llama2c(folder: Path, stories_folder: Path) -> None:
    weights = read_llama2c(folder / "stories260K.bin")
    model, tokenizer = weights.build_model(), load_hf_tokenizer(str(stories_folder))
    assert n_params(weights.config) == sum(p.numel() for p in model.parameters()) == 260_032
    prompt = [tokenizer.bos_id, *tokenizer.encode("Once upon a time")]
    sampling = Sampling(temperature=0)
    # run.c counts <s> and the prompt among its 64 positions
    new = generate(model, [prompt], max_new_tokens=64 - len(prompt) + 1, sampling=sampling)[0]
    assert tokenizer.decode([*prompt[1:], *new]) == STORY


def test_loss_on_childrens_stories_is_near_the_published_one(folder: Path, stories_folder: Path) -> None:
    """Published: 1.297 nats per token on the validation split of TinyStories, in whole windows of 512.

    The stories here are shorter, which raises the loss, and simpler, which lowers it. The tolerance is
    therefore 0.2 nats. An untrained model has log 512 = 6.24.
    """
    model = read_llama2c(folder / "stories260K.bin").build_model()
    tokenizer = load_hf_tokenizer(str(stories_folder))
    nats, count = 0.0, 0
    for story in STORIES:
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(story)]])
        logits = model(ids[:, :-1], causal=True)
        nats += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    assert count > 250
    assert nats / count == pytest.approx(1.297, abs=0.2)


def test_rows_of_rotated_pairs_are_reordered_to_rotated_halves() -> None:
    """One head with d_head 4: the rotated pairs are rows (0, 1) and (2, 3); as halves (0, 2) and (1, 3)."""
    rows = torch.arange(8.0).reshape(4, 2)
    assert deinterleave_rows(rows, 4)[:, 0].tolist() == [0, 4, 2, 6]


def encode_slowly(text: str, pieces: list[str], scores: list[float]) -> list[int]:
    """Encode as run.c does: characters or bytes, then merge the neighbours of best score, leftmost first."""
    id_of_piece = {piece: i for i, piece in enumerate(pieces)}
    ids = []
    for character in " " + text if text else "":
        piece_id = id_of_piece.get(character)
        ids += [piece_id] if piece_id is not None else [byte + 3 for byte in character.encode()]
    while True:
        best, at = float("-inf"), -1
        for i in range(len(ids) - 1):
            merged = id_of_piece.get(pieces[ids[i]] + pieces[ids[i + 1]])
            if merged is not None and scores[merged] > best:
                best, at = scores[merged], i
        if at < 0:
            return ids
        ids[at : at + 2] = [id_of_piece[pieces[ids[at]] + pieces[ids[at + 1]]]]


def test_ids_of_real_text_are_those_of_llama2c(
    folder: Path, stories_folder: Path, scaling_data: Path
) -> None:
    pieces, scores = read_pieces(folder / "tok512.bin")
    tokenizer = load_hf_tokenizer(str(stories_folder))
    assert (tokenizer.n_tokens, tokenizer.bos_id, tokenizer.eod_id) == (512, 1, 1)
    texts = ["", " ", "Once upon a time", "caf\u00e9 \u4f60\u597d \U0001f600\n\tend ", "aaaa bbb <s> <0x41>"]
    with (scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl").open() as lines:
        texts += [json.loads(next(lines))["text"][:300] for _ in range(150)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids == encode_slowly(text, pieces, scores), text
        assert tokenizer.decode(ids) == text
