"""With what bytes of held-out text are counted."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.evaluation import corpus_tokenizer
from megatron.parallel.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


def test_bytes_are_counted_on_every_rank_or_on_none(
    scaling_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are summed over ranks: one that went on without would leave the others waiting."""
    told: list[str] = []
    monkeypatch.setattr(corpus_tokenizer.log, "warning", lambda words, *more: told.append(words % more))
    name = str(scaling_data / "stories260K" / "tok512.bin")
    corpus, weights = SimpleNamespace(sidecar={"tokenizer": {"name": name}}), SimpleNamespace(tokenizer=None)
    found = corpus_tokenizer.load_byte_tokenizer(corpus, weights, None, ALONE)
    assert found is not None and not told
    monkeypatch.setattr(corpus_tokenizer, "any_rank", lambda lacks, world: True)  # another has none
    assert corpus_tokenizer.load_byte_tokenizer(corpus, weights, None, ALONE) is None
    assert told == [f"no bits per byte: a rank has no {found.name}; --tokenizer names one"]
