"""The word cache that threads share: every thread gets the ids of the merges, whichever stored a word."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron.tokenizer.bpe import BpeTokenizer, load_hf_tokenizer
from megatron.tokenizer.encoder import FastEncoder, LibraryEncoder, build_fast_bpe

N_SHARED = 1 << 20  # slots of the shared cache


@pytest.fixture
def tokenizer(scaling_data: Path) -> BpeTokenizer:
    return load_hf_tokenizer(str(scaling_data / "gpt2_tokenizer"))


def make_text(seed: int, n: int) -> str:
    """Return random words of nine letters, nearly all distinct."""
    letters = np.random.default_rng(seed).integers(ord("a"), ord("z") + 1, (n, 10), dtype=np.uint8)
    letters[:, 9] = ord(" ")
    return letters.tobytes().decode()


def test_threads_that_encode_the_same_words_at_once_give_the_librarys_ids(tokenizer: BpeTokenizer) -> None:
    fast, _ = build_fast_bpe(tokenizer)
    texts = [make_text(seed, 500) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        encoders = [FastEncoder(fast) for _ in range(4)]
        results = list(pool.map(lambda encoder: encoder.encode(texts * 3), encoders))
    expected = LibraryEncoder(tokenizer).encode(texts)[0].tolist() * 3
    assert all(ids.tolist() == expected for ids, _ in results)


def test_words_after_the_cache_is_full_get_the_librarys_ids(tokenizer: BpeTokenizer) -> None:
    fast, _ = build_fast_bpe(tokenizer)
    first, second = FastEncoder(fast), FastEncoder(fast)
    for part in range(5):
        first.encode([make_text(100 + part, N_SHARED // 4)])  # more than slots
    text = make_text(7, 2000)
    expected = LibraryEncoder(tokenizer).encode([text])[0].tolist()
    for encoder in (first, second, first, second):  # merged, then cached
        assert encoder.encode([text])[0].tolist() == expected
