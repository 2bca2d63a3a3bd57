"""The words that threads share: whoever met one first, all get the ids that merging gives."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron.tokenizer.bpe import BpeTokenizer, load_tokenizer
from megatron.tokenizer.encoder import FastEncoder, LibraryEncoder, fast_of

N_SHARED = 1 << 20  # words that all threads together keep


@pytest.fixture
def tokenizer(scaling_data: Path) -> BpeTokenizer:
    return load_tokenizer(str(scaling_data / "gpt2_tokenizer"))


def words(seed: int, n: int) -> list[str]:
    """Words of nine letters, each hardly ever twice."""
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, (n, 9), dtype=np.uint8)
    return [row.tobytes().decode() for row in letters]


def test_threads_that_meet_the_same_words_at_once_give_the_librarys_ids(tokenizer: BpeTokenizer) -> None:
    fast, _ = fast_of(tokenizer)
    texts = [" ".join(words(seed, 500)) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        encoders = [FastEncoder(fast) for _ in range(4)]
        found = list(pool.map(lambda encoder: encoder.encode(texts * 3), encoders))
    wanted = LibraryEncoder(tokenizer).encode(texts)[0].tolist() * 3
    assert all(ids.tolist() == wanted for ids, _ in found)


def test_words_that_come_when_there_is_no_room_left_get_the_librarys_ids(tokenizer: BpeTokenizer) -> None:
    fast, _ = fast_of(tokenizer)
    first, second = FastEncoder(fast), FastEncoder(fast)
    for part in range(8):
        first.encode([" ".join(words(100 + part, N_SHARED // 4))])  # twice as many as there are places
    text = " ".join(words(7, 2000))
    wanted = LibraryEncoder(tokenizer).encode([text])[0].tolist()
    for encoder in (first, second, first, second):  # merged, then remembered
        assert encoder.encode([text])[0].tolist() == wanted
