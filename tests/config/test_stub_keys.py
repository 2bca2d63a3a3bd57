"""The training stub of exp-maxie: its keys are renamed or dropped, and its YAML runs with one override."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from megatron.config.read import build_config, read_config
from megatron.config.stub_keys import HF, load_stub_keys
from megatron.config.yaml_file import merge_sections, parse_overrides
from megatron.plan.run_plan import plan_run

FOLDER = Path(__file__).parent
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BASE = {
    "dataset": {"path_train": "synthetic"}, "lr_scheduler": {"total_iterations": 9},
    "model": {"n_tokens": 300, "hf_config": SHAPE},
}  # fmt: skip


def read(*words: str) -> Any:
    return build_config(merge_sections(BASE, parse_overrides(words)))


def test_the_yaml_of_the_guide_runs_with_the_override_that_its_error_names() -> None:
    path, word = FOLDER / "exp_maxie_training.yaml", "dataset.path_train=synthetic"
    with pytest.raises(ValueError, match=rf"got train\.csv.* set {word}\."):
        read_config(path)
    config = read_config(path, [word], lambda key, data: 50257)
    assert plan_run(config).n_steps == 1_000_000
    assert (config.dataset.path_eval, config.model.n_layers, config.model.d_model) == ("synthetic", 32, 1280)
    assert (config.dist.compile, config.dist.sharding_stage) == (True, "zero3_hybrid")
    assert config.lr_scheduler.lr_min_ratio == pytest.approx(1e-7 / 3e-4)
    assert config.logging.run_dir == "experiments/logs/dummy-5.0"
    assert (config.model.feed_forward, config.model.norm_eps) == ("gelu", 1e-12)
    assert config.evaluation.max_samples == 2560  # 10 batches of 256


def test_the_published_base_yaml_is_read_with_its_tags() -> None:
    config = read_config(FOLDER / "exp_maxie_base.yaml")
    assert (config.optim.lr, config.optim.weight_decay) == (1.5e-4, 0.001)
    assert config.lr_scheduler.lr_min_ratio == pytest.approx(1e-7 / 1.5e-4)
    assert (config.lr_scheduler.total_iterations, config.dataset.path_eval) == (1_000_000, "held_out")


def test_verify_cluster_is_read_unaltered(root: Path) -> None:
    config = read_config(root / "examples_scaling/training/verify_cluster.yaml", (), lambda key, data: 50257)
    assert plan_run(config).n_steps == 1_000_000 and config.dist.sharding_stage == "zero3"


SUCCESSORS = [
    ("lr_scheduler.min_lr=3e-5", "lr_scheduler.lr_min_ratio", 0.1),  # a tenth of the default rate 3e-4
    ("misc.compiles_model=true", "dist.compile", True),
    ("misc.sharding_stage=zero3", "dist.sharding_stage", "zero3"),
    ("dataset.path_val=text", "dataset.path_eval", "text"),
    ("checkpoint.path_chkpt_prev=a/b", "checkpoint.resume", "a/b"),
    ("checkpoint.path_chkpt_prev=", "checkpoint.resume", "auto"),
    ("checkpoint.pretrain=a/b", "checkpoint.init_from", "a/b"),
    ("logging.directory=a/b", "logging.run_dir", "a/b"),
    ("logging.prefix=dummy", "logging.run_dir", "experiments/dummy"),
    ("misc.max_eval_iter=10", "evaluation.max_samples", 2560),
    (f"{HF}.attention_probs_dropout_prob=0.25", "model.attention_dropout", 0.25),
    (f"{HF}.hidden_dropout_prob=0.25", "model.hidden_dropout", 0.25),
]


def test_a_renamed_key_sets_its_successor() -> None:
    for word, successor, expected in SUCCESSORS:
        section, _, key = word.partition("=")[0].rpartition(".")
        assert load_stub_keys()[section][key] == successor
        assert attrgetter(successor)(read(word)) == pytest.approx(expected)


def test_keys_without_effect_change_nothing() -> None:
    names = [f"{name}.{key}" for name, keys in load_stub_keys().items() for key in keys if not keys[key]]
    assert len(names) == 34 and read(*[f"{name}=1" for name in names]) == read()


REFUSED = [
    ("loss.grad_accum_steps=4", "expected grad_accum_steps 1. Set dataset.batch_size and microbatch"),
    ("loss.grad_accum=1", "loss: expected grad_accum_steps 1"),
    ("lr_scheduler.min_lr=low", "lr_scheduler.lr_min_ratio: got 'low'"),
    ("misc.max_eval_iter=ten", "evaluation.max_samples: got 'ten'"),
    ("dataset.path_eval=b.csv dataset.path_train=a", "path_eval: got b.csv, expected the prefix"),
    ("misc.compiles_model=true dist.compile=false", "dist.compile: got False, but True from the st"),
    (f"{HF}.hidden_act=gelu", "hf_config.hidden_act: got 'gelu', expected 'silu'"),  # a gated gelu
    (f"{HF}.hidden_act=gelu {HF}.layer_norm_eps=1e-6 {HF}.model_type=llama", "hf_config.hidden_act"),
]


def test_a_value_that_cannot_be_converted_is_refused() -> None:
    for words, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            read(*words.split())
