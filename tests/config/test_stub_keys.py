"""The training stub of exp-maxie: its keys are renamed or dropped, and its YAML runs with one override."""

from pathlib import Path
from typing import Any

import pytest

from megatron.config.read import build_config, read_config
from megatron.config.stub_keys import HF, load_stub_keys
from megatron.config.yaml_file import merge_sections, parse_overrides
from megatron.plan.run_plan import plan_run

# names and values of test_config_training.yaml of exp-maxie, with placeholders of data files
STUB = """
checkpoint: {state_dict_type: full, chkpt_saving_iterations: 100, preempt_metadata_path: preemptive,
  preempt_chkpt_saving_iterations: 100, directory: experiments/chkpts, prefix: dummy-0.1,
  path_chkpt_prev: null, pretrain: null}
dataset:
  {batch_size: 256, cache_size: 0, debug: false, drop_last_in_loader: true, drop_last_in_sampler: true,
   num_workers: 1, path_train: train.csv, path_eval: eval.csv, pin_memory: true, prefetch_factor: 2,
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
"""
# keys of its published base.yaml that differ, some with tags
BASE_YAML = """
checkpoint: {offload_to_cpu: false, rank0_only: true}
dataset: {path_val: held_out, transforms: {set: {instance_norm: false}}}
lr_scheduler: {min_lr: !!float 1e-7, total_iterations: !!int 1_000_000}
misc: {sharding_stage: zero3, peak_flops_per_sec: !!float 112e12}
model: {n_tokens: 300, hf_config: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}
optim: {lr: !!float 1.5e-4, weight_decay: !!float 0.001}
"""
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BASE: dict[str, Any] = {
    "dataset": {"path_train": "synthetic"},
    "lr_scheduler": {"total_iterations": 9},
    "model": {"n_tokens": 300, "hf_config": SHAPE},
}


def read(*words: str, base: dict[str, Any] = BASE) -> Any:
    return build_config(merge_sections(base, parse_overrides(words)))


def get(config: Any, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def test_the_yaml_of_the_guide_runs_with_the_override_that_its_error_names(tmp_path: Path) -> None:
    path = tmp_path / "stub.yaml"
    path.write_text(STUB)
    with pytest.raises(ValueError) as refused:
        read_config(path)
    word = "dataset.path_train=synthetic"
    assert f"set {word}." in str(refused.value) and "got train.csv" in str(refused.value)
    config = read_config(path, [word], lambda key, data: 50257)
    assert plan_run(config).n_steps == 1_000_000
    assert (config.dataset.path_eval, config.model.n_layers, config.model.d_model) == ("synthetic", 32, 1280)
    assert (config.dist.compile, config.dist.sharding_stage) == (True, "zero3_hybrid")
    assert config.lr_scheduler.lr_min_ratio == pytest.approx(1e-7 / 3e-4)
    assert config.logging.run_dir == "experiments/logs/dummy-5.0"
    assert (config.model.feed_forward, config.model.norm_eps) == ("gelu", 1e-12)
    assert config.evaluation.max_samples == 2560  # 10 batches of 256


def test_the_published_base_yaml_is_read_with_its_tags(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(BASE_YAML)
    config = read_config(path)
    assert (config.optim.lr, config.optim.weight_decay) == (1.5e-4, 0.001)
    assert config.lr_scheduler.lr_min_ratio == pytest.approx(1e-7 / 1.5e-4)
    assert (config.lr_scheduler.total_iterations, config.dataset.path_eval) == (1_000_000, "held_out")


def test_verify_cluster_is_read_unaltered(root: Path) -> None:
    config = read_config(root / "examples_scaling/training/verify_cluster.yaml", (), lambda key, data: 50257)
    assert plan_run(config).n_steps == 1_000_000 and config.dist.sharding_stage == "zero3"


@pytest.mark.parametrize(
    ("word", "successor", "expected"),
    [
        ("lr_scheduler.min_lr=3e-5", "lr_scheduler.lr_min_ratio", 0.1),  # of the default rate 3e-4
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
    ],
)
def test_a_renamed_key_sets_its_successor(word: str, successor: str, expected: Any) -> None:
    section, _, key = word.partition("=")[0].rpartition(".")
    assert load_stub_keys()[section][key] == successor
    assert get(read(word), successor) == pytest.approx(expected)


def test_keys_without_effect_change_nothing() -> None:
    names = [f"{name}.{key}" for name, keys in load_stub_keys().items() for key in keys if not keys[key]]
    assert len(names) == 34 and read(*[f"{name}=1" for name in names]) == read()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("loss.grad_accum_steps=4", "expected grad_accum_steps 1. Set dataset.batch_size and microbatch"),
        ("loss.grad_accum=1", "loss: expected grad_accum_steps 1"),
        ("lr_scheduler.min_lr=low", "lr_scheduler.lr_min_ratio: got 'low'"),
        ("misc.max_eval_iter=ten", "evaluation.max_samples: got 'ten'"),
        ("dataset.path_eval=b.csv dataset.path_train=a", "path_eval: got b.csv, expected the prefix"),
        ("misc.compiles_model=true dist.compile=false", "dist.compile: got False, but True from the st"),
        (f"{HF}.hidden_act=gelu", "hf_config.hidden_act: got 'gelu', expected 'silu'"),  # a gated gelu
        (f"{HF}.hidden_act=gelu {HF}.layer_norm_eps=1e-6 {HF}.model_type=llama", "hf_config.hidden_act"),
    ],
)
def test_a_value_that_cannot_be_taken_over_is_refused(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(*word.split())
