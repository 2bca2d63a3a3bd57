"""Valid configurations, and the errors of invalid ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.read import config_to_dict
from megatron.plan.resolve import load_config, resolve_config
from megatron.plan.run_plan import plan_run
from tests.wrong_values import read_refusal

SHAPE = {"d_model": 64, "n_heads": 4, "n_layers": 2, "n_tokens": 100}


def minimal_settings(**sections: dict) -> dict:
    return {"model": SHAPE, "lr_scheduler": {"total_iterations": 10}, **sections}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Prefix of a dataset with only a sidecar of 1,001 tokens; planning reads nothing else."""
    sidecar = {"tokens": 1001, "tokenizer": {"n_tokens": 300}, "sha256": {"bin": "aa", "idx": "bb"}}
    (tmp_path / "text.json").write_text(json.dumps(sidecar))
    return str(tmp_path / "text")


def test_the_vocabulary_comes_from_the_sidecar_of_the_corpus(corpus: str) -> None:
    shape = {key: value for key, value in SHAPE.items() if key != "n_tokens"}
    config = resolve_config(minimal_settings(model=shape, dataset={"path_train": corpus}))
    # 300 tokens and [MASK], padded to a multiple of 128
    assert (config.model.n_tokens, config.model.vocab_rows) == (300, 384)


DATA = {"seq_len": 10, "batch_size": 4}
WSD = {"kind": "wsd", "total_iterations": 10, "warmup_iterations": 6, "decay_fraction": 0.5}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {}}, "model: no shape"),
    ({"model": {"size": "425", "n_tokens": 10}}, "did you mean '425M'?"),
    ({"model": {"d_model": 64}}, "model.n_heads: missing, expected with model.d_model=64"),
    ({"model": {"hf_config": {"hidden_siz": 64}}}, "did you mean 'hidden_size'?"),
    ({"model": {"size": "7M", "hf_config": {"hidden_size": 1280}}}, "'7M' has d_model 128, but the"),
    ({"model": {"size": "7M", "n_layers": 4}}, "has n_layers 3, but the explicit shape has 4"),
    ({"model": {"size": "7M"}, "dataset": {}}, "dataset.path_train: missing; set a .bin/.idx prefix"),
    # 1,001 tokens hold 100 windows of 10 + 1
    ({"dataset": {"seq_len": 2000}}, "expected at least one window of 2000 + 1"),
    ({"dataset": {"seq_len": 10, "batch_size": 101}}, "101 samples a step, expected 100 or less"),
    ({"lr_scheduler": {"total_tokens": 10}}, "total_tokens: 10 is less than one step of 4"),
    ({"lr_scheduler": {"total_epochs": 0.01}}, "total_epochs: 0.01 is less than one step of 4"),
    ({"lr_scheduler": WSD}, "6 warm-up and 5 decay steps are more than the run's 10"),
]


def test_an_impossible_run_is_refused(corpus: str) -> None:
    for sections, sentence in REFUSED:
        if sections.get("dataset", DATA):
            sections = {**sections, "dataset": {"path_train": corpus, **sections.get("dataset", DATA)}}
        message = read_refusal(lambda: plan_run(resolve_config(minimal_settings(**sections))))  # noqa: B023
        assert sentence in str(message)


def test_omitted_shape_keys_follow_from_the_others(corpus: str, tmp_path: Path) -> None:
    gelu = resolve_config(minimal_settings(model={**SHAPE, "feed_forward": "gelu", "positions": "learned"}))
    assert (gelu.model.d_ff, gelu.model.n_positions, gelu.model.kv_heads) == (256, gelu.dataset.seq_len, 4)
    sidecar = json.loads(Path(f"{corpus}.json").read_text())
    sidecar["tokenizer"]["eod_id"] = 17
    Path(f"{corpus}.json").write_text(json.dumps(sidecar))
    shape = {"d_model": 64, "n_heads": 4, "n_layers": 2, "document_mask": True}
    assert resolve_config(minimal_settings(model=shape, dataset={"path_train": corpus})).model.eod_id == 17


NEW_SHAPE = "model.d_model=64 model.n_heads=2 model.n_layers=3"
OLD = "d_model: 32, n_heads: 2, n_layers: 2"


@pytest.mark.parametrize(
    ("model", "words", "label", "d_model"),
    [
        (OLD, "model.size=425", None, 0),
        (OLD, "model={size: 425}", None, 0),
        (f"size: mine, {OLD}", "model.size=yours", None, 0),
        (OLD, f"model.size=425 {NEW_SHAPE}", "425", 64),
        (OLD, "model.size=7M model.d_model=null model.n_heads=null model.n_layers=null", "7M", 128),
        (f"size: mine, {OLD}", "", "mine", 32),
        (f"size: mine, {OLD}", "model.size=null", "custom", 32),
        ("size: 14M", "model.size=7M", "7M", 128),
    ],
)
def test_a_size_on_the_command_line_sets_the_shape(
    tmp_path: Path, model: str, words: str, label: str | None, d_model: int
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{{model}}}\nlr_scheduler: {{total_iterations: 5}}\n")
    overrides = [*words.replace(": ", ":~").split(), "model.n_tokens=200", "misc.seed=7"]
    overrides = [word.replace("~", " ") for word in overrides]
    if label is None:
        with pytest.raises(ValueError, match="is not in model_sizes.yaml"):
            load_config(path, overrides)
    else:
        config = load_config(path, overrides)
        assert (config.model.size, config.model.d_model, config.misc.seed) == (label, d_model, 7)
        assert resolve_config(config_to_dict(config)) == config
