"""The vocabulary comes from the corpus, and only plan/resolve.py opens its files."""

from typing import Any

import pytest

from megatron.config.read import build_config

SHAPE = {"d_model": 64, "n_heads": 4, "n_layers": 2}
LENGTH = {"total_iterations": 1}


@pytest.mark.parametrize(
    ("more", "key"), [({}, "n_tokens"), ({"n_tokens": 9, "document_mask": True}, "eod_id")]
)
def test_a_vocabulary_that_is_needed_and_not_passed_is_refused(more: dict[str, Any], key: str) -> None:
    raw = {"model": SHAPE | more, "dataset": {"path_train": "corpus"}, "lr_scheduler": LENGTH}
    with pytest.raises(ValueError, match=rf"model.{key}: missing, expected beside a corpus \(corpus\)"):
        build_config(raw)
    config = build_config(raw, vocabulary=lambda name, data: {"n_tokens": 9, "eod_id": 5}[name])
    assert getattr(config.model, key) == {"n_tokens": 9, "eod_id": 5}[key]
