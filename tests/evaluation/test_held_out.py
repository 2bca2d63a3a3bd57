"""The tokenizer for counting the bytes of held-out text."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.evaluation import corpus_tokenizer
from megatron.parallel.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


def test_bytes_are_counted_on_every_rank_or_on_none(
    stories_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are summed over ranks: a rank without a tokenizer would block the others."""
    warnings: list[str] = []
    monkeypatch.setattr(corpus_tokenizer.log, "warning", lambda words, *more: warnings.append(words % more))
    name = str(stories_folder)
    corpus, weights = SimpleNamespace(sidecar={"tokenizer": {"name": name}}), SimpleNamespace(tokenizer=None)
    tokenizer = corpus_tokenizer.load_byte_tokenizer(corpus, weights, None, ALONE)
    assert tokenizer is not None and not warnings
    monkeypatch.setattr(
        corpus_tokenizer, "any_rank", lambda lacks, world: True
    )  # another rank has no tokenizer
    assert corpus_tokenizer.load_byte_tokenizer(corpus, weights, None, ALONE) is None
    assert warnings == [f"no bits per byte: a rank cannot load {tokenizer.name}; give --tokenizer"]
