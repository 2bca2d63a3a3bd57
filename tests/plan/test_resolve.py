"""The vocabulary comes from the corpus, and only plan/resolve.py opens its files."""

from pathlib import Path
from typing import Any

import pytest

from megatron.config.read import build_config
from megatron.plan.resolve import load_config, resolve_config

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


def test_the_vocabulary_of_a_corpus_is_read_from_its_sidecar(tmp_path: Path) -> None:
    (tmp_path / "corpus.json").write_text('{"tokenizer": {"n_tokens": 300, "eod_id": 7}}')
    data = {"path_train": str(tmp_path / "corpus")}
    model = {**SHAPE, "document_mask": True}
    masked = resolve_config({"model": model, "dataset": data, "lr_scheduler": LENGTH})
    assert (masked.model.n_tokens, masked.model.eod_id) == (300, 7)
    (tmp_path / "run.yaml").write_text("model: {d_model: 64, n_heads: 4, n_layers: 2}\n")
    words = [f"dataset.path_train={tmp_path / 'corpus'}", "lr_scheduler.total_iterations=1"]
    assert load_config(tmp_path / "run.yaml", words).model.n_tokens == 300
