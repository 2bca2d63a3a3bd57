"""Fixture of the tests of preprocessing."""

import pytest

from megatron.tokenizer.train_bpe import train_bpe
from tests.text.preprocessing import TEXTS


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(TEXTS, 280, folder)
    return str(folder)
