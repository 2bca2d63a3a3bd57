"""Every key of exp-maxie's test_config_training.yaml is accepted, translated or named with its successor."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.config.migration.stub_keys import HF, NO_EFFECT, REFUSED, STUB_KEYS, TRANSLATED
from megatron.config.read import build_config
from megatron.config.schema import RunConfig
from megatron.config.yaml_file import load_yaml_text, read_yaml
from megatron.log import get_logger

# names and values of test_config_training.yaml in the repository of exp-maxie; paths are synthetic
STUB = yaml.safe_load("""
checkpoint: {state_dict_type: full, chkpt_saving_iterations: 100, preempt_metadata_path: preemptive,
  preempt_chkpt_saving_iterations: 100, directory: experiments/chkpts, prefix: dummy-0.1,
  path_chkpt_prev: null, pretrain: null}
dataset:
  {batch_size: 256, cache_size: 0, debug: false, drop_last_in_loader: true, drop_last_in_sampler: true,
   num_workers: 1, path_train: synthetic, path_eval: synthetic, pin_memory: true, prefetch_factor: 2,
   seg_size: 2560, num_channels: 1, input: {C: 1, H: 1920, W: 1920, total_size: 256000},
   transforms: {H_pad: 1920, Hv: 256, W_pad: 1920, Wv: 256, angle_max: 360, frac_shift_max: 0.1, num_crop: 8,
     num_patch: 100, sampling_fraction: null, sigma: 0.333, size_patch: 20, var_size_patch: 0.2,
     set: {uses_instance_norm: false, batch_sampler: false, pad: true, polar_center_crop: false,
       random_patch: false, random_rotate: false, random_shift: false}}}
dist: {cpu_only: false, backend: nccl, uses_unique_world_seed: true, dtype: bfloat16,
  sharding_stage: zero3_hybrid}
logging: {directory: experiments/logs, prefix: dummy-5.0, level: info}
loss: {grad_accum_steps: 1}
lr_scheduler: {min_lr: 1.0e-07, total_iterations: 1000000, warmup_iterations: 10,
  scheduler_update_iterations: 1}
misc: {max_epochs: 5, max_eval_iter: 10, max_eval_retry: 2, compiles_model: true, data_dump_on: false,
  peak_flops_per_sec: 312000000000000, monitors_dynamics: false}
model:
  from_scratch: false
  hf_config: {hidden_size: 1280, num_hidden_layers: 32, num_attention_heads: 16, intermediate_size: 5120,
    hidden_act: gelu, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, initializer_range: 0.02,
    layer_norm_eps: 1.0e-12, image_size: 1920, patch_size: 128, num_channels: 1, qkv_bias: true,
    decoder_num_attention_heads: 16, decoder_hidden_size: 512, decoder_num_hidden_layers: 16,
    decoder_intermediate_size: 2048, mask_ratio: 0.75, norm_pix_loss: true}
optim: {grad_clip: 1.0, lr: 0.0003, weight_decay: 0.05, beta1: 0.9, beta2: 0.95, fused: false}
""")
# of the published hydra_config/train_config/base.yaml: its numbers with tags, and the keys that STUB lacks
BASE_YAML = """
checkpoint: {offload_to_cpu: false, rank0_only: true}
dataset: {path_val: experiments/datasets/dataset.val.json, transforms: {set: {instance_norm: false}}}
lr_scheduler: {min_lr: !!float 1e-7, total_iterations: !!int 1_000_000}
misc: {sharding_stage: zero3, peak_flops_per_sec: !!float 112e12}
optim: {lr: !!float 1.5e-4, weight_decay: !!float 0.001}
"""
VISION = [
    "image_size", "patch_size", "num_channels", "qkv_bias", "decoder_num_attention_heads", "mask_ratio",
    "decoder_hidden_size", "decoder_num_hidden_layers", "decoder_intermediate_size", "norm_pix_loss",
]  # fmt: skip


def leaves(section: Any, place: str = "") -> dict[str, Any]:
    if not isinstance(section, dict):
        return {place: section}
    return {
        name: leaf
        for key, value in section.items()
        for name, leaf in leaves(value, f"{place}.{key}".lstrip(".")).items()
    }


ALL = leaves(load_yaml_text(BASE_YAML, "base.yaml")) | leaves(STUB)
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BASE = {
    "dataset": {"path_train": "synthetic"},
    "lr_scheduler": {"total_iterations": 9},
    "model": {"n_tokens": 300, "hf_config": SHAPE},
}


def with_key(name: str, value: Any, base: dict[str, Any] = BASE) -> dict[str, Any]:
    raw = copy.deepcopy(base)
    section = raw
    *path, key = name.split(".")
    for word in path:
        section = section.setdefault(word, {})
    section[key] = value
    return raw


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def read(settings: RunConfig, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(settings, section), key)


def test_the_configuration_has_89_keys_and_the_table_names_those_that_differ() -> None:
    assert len(leaves(STUB)) == 89
    assert ALL.keys() >= STUB_KEYS.keys()
    assert len(ALL.keys() - STUB_KEYS.keys()) == 23


@pytest.mark.parametrize("name", [name for name in ALL if name not in STUB_KEYS])
def test_a_key_of_both_is_read_under_its_own_name(name: str) -> None:
    if name.startswith(HF):
        config = build_config(with_key(name, ALL[name]))
        ours = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "intermediate_size": "d_ff",
                "num_attention_heads": "n_heads"}[name.rpartition(".")[2]]  # fmt: skip
        assert read(config, f"model.{ours}") == ALL[name]
    else:
        assert read(build_config(with_key(name, ALL[name])), name) == ALL[name]


@pytest.mark.parametrize("key", STUB_KEYS.values(), ids=lambda key: key.name)
def test_a_key_of_the_stub_is_translated_dropped_with_the_reason_or_refused(key, logged) -> None:
    # beside a key that only the stub has: alone, hidden_act is that of a language model
    raw = with_key(key.name, ALL[key.name], with_key(f"{HF}.hidden_dropout_prob", 0.0))
    successor = key.successor.partition("=")[0]
    assert not successor or read(build_config(BASE), successor) is not NotImplemented  # the key exists
    if key.outcome == REFUSED and not key.harmless:
        with pytest.raises(ValueError, match=f"{key.name.rpartition('.')[2]} -> {key.successor}"):
            build_config(raw)
        return
    plain, config = build_config(BASE), build_config(raw)
    if key.outcome == NO_EFFECT:
        assert config == plain
        assert f"no effect here, {key.note}: {key.name}" in logged.text
        assert not key.successor or f"(see {key.successor})" in logged.text
    elif key.outcome == REFUSED:  # a harmless value
        assert config == plain


TRANSLATIONS = [
    ("lr_scheduler.min_lr", 3e-5, "lr_scheduler.lr_min_ratio", 0.1),  # of the default rate 3e-4
    ("misc.compiles_model", True, "dist.compile", True),
    ("misc.sharding_stage", "zero3", "dist.sharding_stage", "zero3"),
    ("dataset.path_val", "text_val", "dataset.path_eval", "text_val"),
    ("checkpoint.path_chkpt_prev", "a/b", "checkpoint.resume", "a/b"),
    ("checkpoint.path_chkpt_prev", None, "checkpoint.resume", "auto"),
    ("checkpoint.pretrain", "a/b", "checkpoint.init_from", "a/b"),
    ("logging.directory", "experiments/logs", "logging.run_dir", "experiments/logs"),
    ("logging.prefix", "dummy", "logging.run_dir", "experiments/dummy"),
    ("misc.max_eval_iter", 10, "evaluation.max_samples", 2560),
    ("misc.max_epochs", 5, "lr_scheduler.total_epochs", None),  # the length is set in steps
    (f"{HF}.layer_norm_eps", 1e-12, "model.norm_eps", 1e-12),
    (f"{HF}.attention_probs_dropout_prob", 0.25, "model.attention_dropout", 0.25),
    (f"{HF}.hidden_dropout_prob", 0.25, "model.hidden_dropout", 0.25),
]


@pytest.mark.parametrize(("name", "value", "successor", "expected"), TRANSLATIONS, ids=lambda word: str(word))
def test_a_translated_key_sets_its_successor(name: str, value: Any, successor: str, expected: Any) -> None:
    assert STUB_KEYS[name].outcome == TRANSLATED and STUB_KEYS[name].successor == successor
    assert read(build_config(with_key(name, value)), successor) == pytest.approx(expected)


def test_epochs_set_the_length_where_nothing_else_does() -> None:
    raw = with_key("misc.max_epochs", 5)
    raw["lr_scheduler"] = {}
    raw["dataset"] = {"path_train": "text"}
    assert build_config(raw).lr_scheduler.total_epochs == 5


def test_activation_and_initial_weights_are_the_stubs_only_beside_its_other_keys(logged) -> None:
    with pytest.raises(ValueError, match=r"hf_config.hidden_act: got 'gelu', expected 'silu'"):
        build_config(with_key(f"{HF}.hidden_act", "gelu"))  # a gated gelu, of a language model
    raw = with_key(f"{HF}.initializer_range", 0.5)
    assert build_config(raw).model.init_std == 0.02
    for name, value in (("hidden_act", "gelu"), ("layer_norm_eps", 1e-6)):
        raw = with_key(f"{HF}.{name}", value, raw)
    config = build_config(raw)
    assert (config.model.feed_forward, config.model.init_std, config.model.norm_eps) == ("gelu", 0.5, 1e-6)
    raw = with_key(f"{HF}.model_type", "llama", raw)
    with pytest.raises(ValueError, match="hidden_act"):
        build_config(raw)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss.grad_accum_steps", 4, "Set dataset.batch_size to batch_size x ranks x grad_accum_steps"),
        ("lr_scheduler.min_lr", "low", "lr_scheduler.lr_min_ratio: got 'low'"),
        ("misc.max_eval_iter", "ten", "evaluation.max_samples: got 'ten'"),
        ("loss.grad_accum", 1, "unknown key 'loss'"),
        ("dataset.transforms.other", 1, "unknown key 'dataset.transforms'"),
    ],
)
def test_a_value_that_cannot_be_taken_over_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(with_key(name, value))


def test_a_successor_with_another_value_is_a_contradiction() -> None:
    raw = with_key("dist.compile", False, with_key("misc.compiles_model", True))
    with pytest.raises(ValueError, match="dist.compile: got False, but True from the training stub"):
        build_config(raw)


def test_the_whole_configuration_names_its_image_keys_and_is_read_without_them(root: Path, logged) -> None:
    raw = copy.deepcopy(STUB)
    raw["model"]["n_tokens"] = 300
    with pytest.raises(ValueError, match="keys of an image model") as refused:
        build_config(raw)
    assert all(f"{name} -> " in str(refused.value) for name in VISION)
    for name in VISION:
        del raw["model"]["hf_config"][name]
    config = build_config(raw)
    assert (config.dist.compile, config.dist.sharding_stage, config.model.n_layers) == (
        True,
        "zero3_hybrid",
        32,
    )
    assert config.lr_scheduler.lr_min_ratio == pytest.approx(1e-7 / 3e-4)
    assert (config.logging.run_dir, config.checkpoint.directory) == (
        "experiments/logs/dummy-5.0", "experiments/chkpts"
    )  # fmt: skip
    assert (config.model.feed_forward, config.model.norm_eps, config.evaluation.max_samples) == (
        "gelu", 1e-12, 2560
    )  # fmt: skip
    assert len(logged.messages) == 5  # a line for each reason, and one for the epochs


def test_the_tagged_numbers_and_other_keys_of_the_published_base_yaml_are_read(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(f"model: {{n_tokens: 300, hf_config: {SHAPE}}}\n{BASE_YAML}")
    config = build_config(read_yaml(path))
    assert (config.optim.lr, config.optim.weight_decay) == (1.5e-4, 0.001)
    assert config.lr_scheduler.lr_min_ratio == pytest.approx(1e-7 / 1.5e-4)
    assert config.lr_scheduler.total_iterations == 1_000_000
    assert config.dist.sharding_stage == "zero3"
    assert config.dataset.path_eval == "experiments/datasets/dataset.val.json"
