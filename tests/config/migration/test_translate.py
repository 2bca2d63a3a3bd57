"""Translation of Megatron's arguments: an example for each row of the table, and the rules between them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.migration.argument import IMPLIED, LIST, NO_EFFECT, TRANSLATED, UNSUPPORTED
from megatron.config.migration.command_line import ARGUMENTS
from megatron.config.migration.megatron_command import translate_command
from megatron.config.migration.megatron_table import SECTIONS
from megatron.config.migration.megatron_unused import FAMILIES, NO_EFFECTS, REFUSED
from megatron.config.migration.translate import Translation
from megatron.config.read import build_config
from megatron.kernels.rotary import compute_frequencies
from megatron.model.precision import choose_precision
from megatron.model.transformer import Gpt

LLAMA = "--use-rotary-position-embeddings --swiglu --normalization RMSNorm --disable-bias-linear"
BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --data-path d --split 100 "
    f"--vocab-size 1000 --hidden-dropout 0 --attention-dropout 0 {LLAMA}"
)
EVAL = "-split --valid-data-path v"
# argument -> words added to BASE (-name: taken away first), and the settings that must follow
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "num-layers": ("--num-layers 6", {"model.n_layers": 6}),
    "encoder-num-layers": ("-num-layers --encoder-num-layers 6", {"model.n_layers": 6}),
    "hidden-size": ("--hidden-size 96", {"model.d_model": 96}),
    "ffn-hidden-size": ("--ffn-hidden-size 300", {"model.d_ff": 300}),
    "num-attention-heads": ("--num-attention-heads 2", {"model.n_heads": 2}),
    "kv-channels": ("--kv-channels 32", {"model.d_head": 32}),
    "group-query-attention": ("--group-query-attention", {"model.n_kv_heads": 1}),
    "num-query-groups": ("--group-query-attention --num-query-groups 2", {"model.n_kv_heads": 2}),
    "num-key-value-heads": ("--num-key-value-heads 2", {"model.n_kv_heads": 2}),
    "max-position-embeddings": (
        "-use-rotary-position-embeddings --max-position-embeddings 256",
        {"model.n_positions": 256, "model.positions": "learned"},
    ),
    "position-embedding-type": (
        "-use-rotary-position-embeddings --position-embedding-type rope", {"model.positions": "rotary"},
    ),
    "use-rotary-position-embeddings": ("", {"model.positions": "rotary"}),
    "rotary-base": ("--rotary-base 500000", {"model.rope_theta": 500000.0}),
    "rotary-position-embeddings-theta": (
        "--rotary-position-embeddings-theta 500000", {"model.rope_theta": 500000.0},
    ),
    "rotary-percent": ("--rotary-percent 0.25", {"model.rotary_dims": 4}),
    "rotary-seq-len-interpolation-factor": (
        "--rotary-seq-len-interpolation-factor 4", {"model.rope_scaling": "linear", "model.rope_factor": 4.0},
    ),
    "use-rope-scaling": (
        "--use-rope-scaling",
        {"model.rope_scaling": "llama3", "model.rope_factor": 8.0, "model.rope_original_positions": 8192},
    ),
    "rope-scaling-factor": ("--use-rope-scaling --rope-scaling-factor 32", {"model.rope_factor": 32.0}),
    "window-size": ("--window-size (64,0)", {"model.attention_window": 65}),
    "add-qkv-bias": ("--add-qkv-bias", {"model.qkv_biases": True, "model.biases": False}),
    "normalization": (
        "-disable-bias-linear --normalization LayerNorm", {"model.norm": "layernorm", "model.biases": True},
    ),
    "layernorm-epsilon": ("--layernorm-epsilon 1e-6", {"model.norm_eps": 1e-6}),
    "norm-epsilon": ("--norm-epsilon 1e-6", {"model.norm_eps": 1e-6}),
    "swiglu": ("", {"model.feed_forward": "swiglu"}),
    "openai-gelu": ("-swiglu --openai-gelu", {"model.feed_forward": "gelu"}),
    "disable-bias-linear": ("", {"model.biases": False}),
    "untie-embeddings-and-output-weights": (
        "--untie-embeddings-and-output-weights", {"model.tied_embedding": False},
    ),
    "untie-with-additional-mask": ("--untie-with-additional-mask", {"model.tied_embedding": False}),
    "qk-layernorm": ("--qk-layernorm", {"model.qk_norm": True}),
    "attention-dropout": ("--attention-dropout 0.3", {"model.attention_dropout": 0.3}),
    "hidden-dropout": ("--hidden-dropout 0.2", {"model.hidden_dropout": 0.2}),
    "init-method-std": ("--init-method-std 0.006", {"model.init_std": 0.006}),
    "reset-attention-mask": (
        "--reset-attention-mask --reset-position-ids model.eod_id=0", {"model.document_mask": True},
    ),
    "reset-position-ids": ("--reset-attention-mask --reset-position-ids", {"model.document_mask": True}),
    "vocab-size": ("--vocab-size 1000 --tokenizer-type NullTokenizer", {"model.n_tokens": 1001}),
    "padded-vocab-size": ("--padded-vocab-size 1024", {"model.vocab_rows": 1024}),
    "make-vocab-size-divisible-by": ("--make-vocab-size-divisible-by 300", {"model.vocab_multiple": 300}),
    "vocab-file": ("-vocab-size --vocab-file VOCAB", {"model.n_tokens": 3}),
    "tokenizer-type": ("--tokenizer-type NullTokenizer", {"model.n_tokens": 1001}),
    "tokenizer-model": ("-vocab-size --tokenizer-model gpt2", {"model.n_tokens": 50257}),
    "low-noise-start": (
        "MDM --low-noise-start", {"objective.low_noise_start": 0.5, "objective.low_noise_iterations": 1000},
    ),
    "low-noise-ratio": ("MDM --low-noise-start --low-noise-ratio 0.2", {"objective.low_noise_start": 0.2}),
    "low-noise-iter": ("MDM --low-noise-start --low-noise-iter 9", {"objective.low_noise_iterations": 9}),
    "ar-ratio": ("MDM --ar-ratio 0.25", {"objective.ar_ratio": 0.25}),
    "randmask-ratio": ("--randmask-ratio 0.25", {"objective.randmask_ratio": 0.25}),
    "use-order-list": ("--use-order-list True", {"objective.orders": 1}),
    "num-order-list": ("--num-order-list 4", {"objective.orders": 4}),
    "num-mc": ("MDM --num-mc 128", {"evaluation.num_mc": 128}),
    "optimizer": ("--optimizer adam", {}),
    "lr": ("--lr 2e-4", {"optim.lr": 2e-4}),
    "min-lr": ("--lr 2e-4 --min-lr 2e-5", {"lr_scheduler.lr_min_ratio": 0.1}),
    "weight-decay": ("--weight-decay 0.1", {"optim.weight_decay": 0.1}),
    "adam-beta1": ("--adam-beta1 0.8", {"optim.beta1": 0.8}),
    "adam-beta2": ("--adam-beta2 0.95", {"optim.beta2": 0.95}),
    "adam-eps": ("--adam-eps 1e-6", {"optim.eps": 1e-6}),
    "clip-grad": ("--clip-grad 0.5", {"optim.grad_clip": 0.5}),
    "lr-decay-style": ("--lr-decay-style cosine", {"lr_scheduler.kind": "cosine"}),
    "lr-decay-iters": (
        "--lr-decay-style cosine --lr-decay-iters 60 --lr-warmup-iters 10",
        {"lr_scheduler.decay_iterations": 50},
    ),
    "lr-decay-samples": (
        "-train-iters --train-samples 805 --lr-decay-samples 400", {"lr_scheduler.decay_iterations": 50},
    ),
    "lr-decay-tokens": ("--lr-decay-tokens 51200", {"lr_scheduler.decay_iterations": 50}),
    "lr-wsd-decay-style": (
        "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 20",
        {"lr_scheduler.kind": "wsd", "lr_scheduler.decay_shape": "sqrt"},
    ),
    "lr-wsd-decay-iters": (
        "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 20",
        {"lr_scheduler.decay_iterations": 20, "lr_scheduler.decay_shape": "linear"},
    ),
    "lr-wsd-decay-samples": (
        "--lr-decay-style WSD --lr-wsd-decay-style cosine --lr-wsd-decay-samples 81",
        {"lr_scheduler.decay_iterations": 11},
    ),
    "lr-warmup-fraction": ("--lr-warmup-fraction 0.01", {"lr_scheduler.warmup_fraction": 0.01}),
    "lr-warmup-iters": ("--lr-warmup-iters 7", {"lr_scheduler.warmup_iterations": 7}),
    "lr-warmup-samples": (
        "-train-iters --train-samples 800 --lr-warmup-samples 17", {"lr_scheduler.warmup_iterations": 3},
    ),
    "lr-warmup-tokens": ("--lr-warmup-tokens 2049", {"lr_scheduler.warmup_iterations": 3}),
    "train-iters": ("--train-iters 30", {"lr_scheduler.total_iterations": 30}),
    "train-samples": ("-train-iters --train-samples 807", {"lr_scheduler.total_iterations": 100}),
    "train-tokens": ("-train-iters --train-tokens 2049", {"lr_scheduler.total_iterations": 3}),
    "micro-batch-size": ("--micro-batch-size 4", {"dataset.microbatch_size": 4}),
    "global-batch-size": ("--global-batch-size 16", {"dataset.batch_size": 16}),
    "rampup-batch-size": ("--rampup-batch-size 8 2 1000", {"dataset.batch_size": 8}),
    "seq-length": ("--seq-length 64", {"dataset.seq_len": 64}),
    "encoder-seq-length": ("-seq-length --encoder-seq-length 64", {"dataset.seq_len": 64}),
    "data-path": ("--data-path other", {"dataset.path_train": "other"}),
    "split": (
        "--split 949,50,1",
        {"dataset.path_train": "d_949_50_1_train", "dataset.path_eval": "d_949_50_1_valid"},
    ),
    "train-data-path": ("--train-data-path t", {"dataset.path_train": "t"}),
    "valid-data-path": (f"{EVAL} -data-path --train-data-path t", {"dataset.path_eval": "v"}),
    "train-data-path-file": ("--train-data-path-file t.txt", {"dataset.path_train": "t.txt"}),
    "valid-data-path-file": ("--valid-data-path-file v.txt", {"dataset.path_eval": "v.txt"}),
    "data-args-path": ("-data-path --data-args-path WORDS", {"dataset.path_train": "train_data.txt"}),
    "mock-data": ("--mock-data", {"dataset.path_train": "synthetic"}),
    "num-workers": ("--num-workers 4", {"dataset.num_workers": 4}),
    "seed": ("--seed 7", {"misc.seed": 7}),
    "save": ("--save s", {"logging.run_dir": "s"}),
    "load": ("--save s --load s", {"checkpoint.resume": "auto"}),
    "load-tag": ("--load s --load-tag global_step5", {"checkpoint.resume": "s/global_step5"}),
    "finetune": ("--load s --finetune", {"checkpoint.init_from": "s"}),
    "save-interval": (
        "--save s --save-interval 10",
        {"checkpoint.chkpt_saving_iterations": 10, "checkpoint.keep_last": None},
    ),
    "persistent-save-interval": (
        "--save s --persistent-save-interval 10", {"checkpoint.chkpt_saving_iterations": 10},
    ),
    "non-persistent-save-interval": (
        "--save s --save-interval 50 --non-persistent-save-interval 10",
        {"checkpoint.chkpt_saving_iterations": 10, "checkpoint.keep_every": 50},
    ),
    "save-retain-interval": (
        "--save s --save-interval 10 --save-retain-interval 50",
        {"checkpoint.keep_every": 50, "checkpoint.keep_last": 1},
    ),
    "ckpt-format": ("--ckpt-format torch_dist", {"checkpoint.state_dict_type": "sharded"}),
    "dist-ckpt-format": ("--dist-ckpt-format torch_dist", {"checkpoint.state_dict_type": "sharded"}),
    "use-dist-ckpt": ("--use-dist-ckpt", {"checkpoint.state_dict_type": "sharded"}),
    "async-save": (
        "--async-save", {"checkpoint.asynchronous": True, "checkpoint.state_dict_type": "sharded"},
    ),
    "eval-interval": (f"{EVAL} --eval-interval 50", {"evaluation.every_iterations": 50}),
    "eval-iters": (f"{EVAL} --eval-iters 10", {"evaluation.max_samples": 80}),
    "log-interval": ("--log-interval 5", {"logging.every_iterations": 5}),
    "tensorboard-dir": ("--tensorboard-dir t", {"logging.tensorboard": True}),
    "wandb-project": ("--wandb-project p", {"logging.wandb": "p"}),
    "wandb-exp-name": ("--wandb-exp-name n", {"name": "n"}),
    "profile": ("--profile", {"logging.profile_steps": [10, 12]}),
    "profile-step-start": ("--profile --profile-step-start 8", {"logging.profile_steps": [8, 12]}),
    "profile-step-end": ("--profile --profile-step-end 20", {"logging.profile_steps": [10, 20]}),
    "profile_steps": ("--profile pt --profile_steps 3,4", {"logging.profile_steps": [3, 4]}),
    "kill-switch-file": ("--kill-switch-file k", {"misc.stop_file": "k"}),
    "exit-duration-in-mins": ("--exit-duration-in-mins 90", {"misc.max_hours": 1.5}),
    "no-check-for-nan-in-loss-and-grad": (
        "--no-check-for-nan-in-loss-and-grad", {"misc.on_nonfinite": "skip"},
    ),
    "bf16": ("--bf16", {"dist.dtype": "bfloat16"}),
    "fp16": ("--fp16", {"dist.dtype": "float16"}),
    "fp32-residual-connection": ("--bf16 --fp32-residual-connection", {"dist.residual_dtype": "float32"}),
    "fp8-format": ("--bf16 --fp8-format hybrid", {"dist.float8": True}),
    "fp8-e4m3": ("--bf16 --fp8-e4m3", {"dist.float8": True}),
    "fp8-hybrid": ("--bf16 --fp8-hybrid", {"dist.float8": True}),
    "tensor-model-parallel-size": ("--tensor-model-parallel-size 2", {"dist.tensor_parallel": 2}),
    "pipeline-model-parallel-size": ("--pipeline-model-parallel-size 2", {"dist.pipeline_parallel": 2}),
    "num-layers-per-virtual-pipeline-stage": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        {"dist.pipeline_schedule": "interleaved", "dist.pipeline_chunks": 2},
    ),
    "num-virtual-stages-per-pipeline-rank": (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        {"dist.pipeline_schedule": "interleaved", "dist.pipeline_chunks": 2},
    ),
    "context-parallel-size": (
        "--bf16 --context-parallel-size 2",
        {"dist.context_parallel": 2, "dist.context_method": "ring"},
    ),
    "cp-comm-type": ("--context-parallel-size 2 --cp-comm-type a2a", {"dist.context_method": "ulysses"}),
    "ds-sequence-parallel-size": ("--ds-sequence-parallel-size 2", {"dist.context_parallel": 2}),
    "use-distributed-optimizer": ("--use-distributed-optimizer", {"dist.sharding_stage": "zero1"}),
    "use-torch-fsdp2": ("--use-torch-fsdp2", {"dist.sharding_stage": "zero3"}),
    "use-megatron-fsdp": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"dist.sharding_stage": "zero2"},
    ),
    "use-custom-fsdp": (
        "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params",
        {"dist.sharding_stage": "zero3"},
    ),
    "data-parallel-sharding-strategy": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim", {"dist.sharding_stage": "zero1"},
    ),
    "deepspeed": ("--deepspeed", {"dist.engine": "deepspeed"}),
    "deepspeed_config": (
        "--deepspeed --deepspeed_config JSON",
        {"dist.sharding_stage": "zero1", "dist.offload_optimizer": True, "dist.engine": "deepspeed"},
    ),
    "zero-stage": ("--deepspeed --zero-stage 2", {"dist.sharding_stage": "zero2"}),
    "cpu-optimizer": ("--deepspeed --zero-stage 1 --cpu-optimizer", {"dist.offload_optimizer": True}),
    "optimizer-cpu-offload": (
        "--use-distributed-optimizer --optimizer-cpu-offload", {"dist.cpu_offload": True},
    ),
    "remote-device": ("--deepspeed --zero-stage 3 --remote-device cpu", {"dist.offload_parameters": True}),
    "recompute-activations": ("--recompute-activations", {"dist.activation_checkpointing": "selective"}),
    "recompute-granularity": ("--recompute-granularity full", {"dist.activation_checkpointing": "full"}),
    "checkpoint-activations": ("--checkpoint-activations", {"dist.activation_checkpointing": "full"}),
    "distributed-backend": ("--distributed-backend gloo", {"dist.backend": "gloo"}),
    "distributed-timeout-minutes": ("--distributed-timeout-minutes 30", {"dist.timeout_s": 1800}),
}  # fmt: skip
TABLE = [argument for group in SECTIONS.values() for argument in group]


def translate(words: str, **options: Any) -> Translation:
    """Translate BASE with more words; `-name` takes an argument of BASE away, MDM trains masked diffusion."""
    base, extra = BASE.split(), words.split()
    for name in [word[1:] for word in extra if word.startswith("-") and not word.startswith("--")]:
        first = base.index(f"--{name}")
        end = next((i for i in range(first + 1, len(base)) if base[i].startswith("--")), len(base))
        base = base[:first] + base[end:]
    if "MDM" in extra:
        options["objective"] = "masked_diffusion"
    chosen = [word for word in extra if word != "MDM" and (word.startswith("--") or not word.startswith("-"))]
    return translate_command(base + chosen, **options)


def read_setting(translation: Translation, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return (translation.settings[section] if section else translation.settings)[name]


def find_row(translation: Translation, name: str) -> Any:
    option = ARGUMENTS[name.replace("_", "-")].option
    return next(row for row in translation.rows if row.argument.split()[0] == option)


@pytest.mark.parametrize("argument", TABLE, ids=lambda argument: argument.name)
def test_each_translated_argument_sets_its_key_in_a_valid_configuration(argument, tmp_path: Path) -> None:
    words, expected = EXAMPLES[argument.name]
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "c": 2}')
    (tmp_path / "words.txt").write_text("0.3 a 0.7 b\n")
    offload = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": offload}))
    for name, file in (("VOCAB", "vocab.json"), ("WORDS", "words.txt"), ("JSON", "ds.json")):
        words = words.replace(name, str(tmp_path / file))
    translation = translate(words)
    assert {key: read_setting(translation, key) for key in expected} == expected
    assert find_row(translation, argument.name).outcome == TRANSLATED, translation.rows
    assert set(expected) & set(argument.keys) or not expected
    assert not translation.refused
    assert translation.settings.get("objective", {}).get("name", "autoregressive") == (
        "masked_diffusion" if "MDM" in words else "autoregressive"
    )
    build_config(translation.settings, vocabulary=lambda key, data: 100)


@pytest.mark.parametrize("argument", NO_EFFECTS, ids=lambda argument: argument.name)
def test_each_argument_without_effect_says_why_and_changes_nothing(argument) -> None:
    value = "" if argument.name.startswith(("no-", "use-", "disable-")) else "1"
    words = f"{argument.option} {value}"
    translation = translate(words)
    row = find_row(translation, argument.name)
    assert (row.outcome, row.text) == (NO_EFFECT, argument.note)
    assert translation.settings == translate("").settings


@pytest.mark.parametrize("argument", REFUSED, ids=lambda argument: argument.name)
def test_each_argument_that_cannot_be_met_is_refused_with_what_to_do(argument) -> None:
    assert argument.kind == LIST
    if argument.name == "no-position-embedding":
        words = "-use-rotary-position-embeddings --no-position-embedding"
    else:
        words = f"{argument.option} 77"
    row = find_row(translate(words), argument.name)
    assert row.outcome == UNSUPPORTED and row.text == argument.note and len(row.text) > 5
    for value in argument.harmless:
        assert find_row(translate(f"{argument.option} {value}"), argument.name).outcome == NO_EFFECT


@pytest.mark.parametrize("prefix", FAMILIES)
def test_each_family_of_arguments_is_ignored_or_refused_as_a_whole(prefix: str) -> None:
    is_harmless, note = FAMILIES[prefix]
    translation = translate(f"--{prefix}some-new-name 1")
    row = next(row for row in translation.rows if row.argument.startswith(f"--{prefix}some"))
    assert (row.outcome, row.text) == (NO_EFFECT if is_harmless else UNSUPPORTED, note)


def test_defaults_of_megatron_that_are_others_here_are_set_and_listed() -> None:
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 128 "
        "--max-position-embeddings 128 "
        "--global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path d --split 100"
    )
    translation = translate_command(words.split())
    implied = {row.text for row in translation.rows if row.outcome == IMPLIED}
    assert implied == {
        "model.norm=layernorm", "model.biases=true", "model.feed_forward=gelu", "model.positions=learned",
        "model.attention_dropout=0.1", "model.hidden_dropout=0.1", "dist.dtype=float32", "misc.seed=1234",
        "optim.weight_decay=0.01", "optim.beta2=0.999", "lr_scheduler.kind=linear", "checkpoint.resume=never",
        "lr_scheduler.lr_min_ratio=0", "logging.every_iterations=100", "logging.run_dir=experiments/megatron",
        "logging.tensorboard=false", "dataset.order=megatron", "model.vocab_multiple=128",
    }  # fmt: skip
    assert read_setting(translation, "model.n_positions") == 128


def test_several_corpora_become_a_data_path_file_and_a_split_the_commands_that_cut_them() -> None:
    translation = translate("--data-path 0.3 a 0.7 b --split '90, 10,0'".replace(", ", ","))
    assert translation.files == {
        "train_data.txt": "0.3 a_90_10_0_train\n0.7 b_90_10_0_train\n",
        "valid_data.txt": "0.3 a_90_10_0_valid\n0.7 b_90_10_0_valid\n",
    }
    assert translation.commands == [
        f"python tools/subset_corpus.py --input {name} --split 90,10,0 --output {name}_90_10_0"
        for name in "ab"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-lr", "--lr: missing"),
        ("-num-layers", "--num-layers: missing"),
        ("-train-iters", "--train-iters: missing"),
        ("-data-path", "--data-path: missing"),
        ("-global-batch-size", "--global-batch-size: missing"),
        ("--data-path a b", "got 2 prefixes without weights"),
        ("--data-path 0.3 a 0.7", "got 3 words, expected pairs"),
        ("--split a,b", "--split: got 'a,b'"),
        ("--bf16 --fp16", "--bf16 too"),
        ("--rampup-batch-size 2 2", "expected start, increment and samples"),
        ("--rampup-batch-size 2 2 1e6", "expected start, increment and samples"),
        ("--window-size 64", "--window-size: got '64', expected two whole numbers"),
        ("-train-iters --train-samples 7", "less than one step of 8 samples"),
        ("--lr-decay-style WSD", "--lr-wsd-decay-iters: missing"),
        ("--data-args-path none -data-path", "none: no such file"),
    ],
)
def test_a_command_that_megatron_would_refuse_too_is_an_error(words: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as refused:
        translate(words)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("words", "argument", "advice"),
    [
        ("--rampup-batch-size 4 2 1000", "rampup-batch-size", "a step always has 8 samples"),
        ("--rampup-batch-size 4 2 5_000_000", "rampup-batch-size", "a step always has 8 samples"),
        ("--window-size 64,64", "window-size", "a window is N,0"),
        ("MDM --window-size 64,0", "window-size", "of autoregressive training"),
        (
            "--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            "rotary-seq-len-interpolation-factor",
            "positions have one scaling",
        ),
        ("-data-path --train-weighted-split-paths-path p", "data-path", "missing; give it"),
        ("--train-data-path-file t.list", "train-data-path-file", "ends in .txt"),
        ("--optimizer sgd", "optimizer", "use --optimizer adam"),
        ("--normalization LayerNorm", "disable-bias-linear", "use RMSNorm"),
        ("-swiglu", "disable-bias-linear", "add --openai-gelu"),
        ("--lr-decay-style inverse-square-root", "lr-decay-style", "use cosine"),
        ("--reset-position-ids", "reset-position-ids", "model.document_mask resets both"),
        ("MDM --randmask-ratio 0.5", "randmask-ratio", "an option of autoregressive"),
        ("--ar-ratio 0.5", "ar-ratio", "an option of masked diffusion"),
        ("--distributed-backend ccl", "distributed-backend", "use nccl or gloo"),
        ("--cpu-optimizer", "cpu-optimizer", "add --use-distributed-optimizer"),
        (
            "--position-embedding-type yarn -use-rotary-position-embeddings",
            "position-embedding-type",
            "use rope",
        ),
        ("--context-parallel-size 2 --cp-comm-type allgather", "cp-comm-type", "use p2p or a2a"),
    ],
)
def test_a_value_that_cannot_be_met_is_refused_with_what_to_do(
    words: str, argument: str, advice: str
) -> None:
    translation = translate(words)
    option = "(--data-path" if argument == "data-path" else f"--{argument}"
    row = next(row for row in translation.rows if row.argument.split()[0] == option)
    assert row.outcome == UNSUPPORTED and advice in row.text


def test_an_unknown_argument_is_refused_with_the_nearest_known_one() -> None:
    (row,) = translate("--num-layerz 3").refused
    assert (row.argument, row.text) == (
        "--num-layerz 3",
        "no argument of Megatron; did you mean --num-layers?",
    )


def test_the_engine_is_torch_where_only_it_supports_the_layout() -> None:
    sizes = "--tensor-model-parallel-size 2 --deepspeed --zero-stage 1"
    assert read_setting(translate(sizes), "dist.engine") == "torch"
    assert "tensor_parallel" in find_row(translate(sizes), "deepspeed").text


def test_the_global_batch_follows_from_the_ranks() -> None:
    words = "-global-batch-size --tensor-model-parallel-size 2"
    assert read_setting(translate(words, n_ranks=8), "dataset.batch_size") == 8


@pytest.mark.parametrize(
    ("words", "n_tokens", "rows"),
    [
        ("--vocab-size 32000", None, 32000),  # 250 x 128
        ("--vocab-size 32000 --tensor-model-parallel-size 8", None, 32768),  # 32 x 1024
        ("-vocab-size", 32000, 32000),  # the corpus gives the ids
        ("-vocab-size --tensor-model-parallel-size 4", 32000, 32256),  # 63 x 512
        ("-vocab-size", 50257, 50304),
        ("MDM -vocab-size", 32000, 32128),  # a row for [MASK]: 251 x 128
        ("--padded-vocab-size 1005", None, 1005),
    ],
)
def test_the_embedding_has_the_rows_of_megatron(words: str, n_tokens: int | None, rows: int) -> None:
    config = build_config(translate(words).settings, vocabulary=lambda key, data: n_tokens or 0)
    assert (config.model.vocab_rows, config.model.vocab_multiple) == (rows, None)
    plain = {"d_model": 64, "n_heads": 4, "n_layers": 2, "n_tokens": 32000}
    default = build_config({"model": plain, "lr_scheduler": {"total_iterations": 9}})
    assert default.model.vocab_rows == 32128  # of a run without Megatron's arguments


def test_the_residual_stream_has_the_dtype_of_the_products_unless_float32_is_given() -> None:
    for words, dtypes in (
        ("--bf16", (torch.bfloat16, torch.bfloat16)),
        ("--fp16", (torch.float16, torch.float16)),
        ("--bf16 --fp32-residual-connection", (torch.bfloat16, torch.float32)),
        ("", (torch.float32, torch.float32)),
    ):
        precision = choose_precision(build_config(translate(words).settings).dist)
        assert (precision.compute, precision.residual) == dtypes


@pytest.mark.parametrize(
    ("words", "channels", "linear", "llama3"),
    [
        ("", 128, 1, None),
        ("--rotary-percent 0.25", 32, 1, None),
        ("--rotary-seq-len-interpolation-factor 4", 128, 4, None),
        ("--use-rope-scaling", 128, 1, 8),
        ("--use-rope-scaling --rope-scaling-factor 32 --rotary-percent 0.5", 64, 1, 32),
    ],
)
def test_rotary_angles_are_those_of_megatron(
    words: str, channels: int, linear: int, llama3: float | None
) -> None:
    frequencies = []
    for k in range(0, channels, 2):
        frequency = 500000.0 ** (-k / channels)
        wavelength = 2 * math.pi / frequency
        if llama3 is not None and wavelength > 8192:
            frequency /= llama3
        elif llama3 is not None and wavelength >= 8192 / 4:
            share = (8192 / wavelength - 1) / (4 - 1)
            frequency = (1 - share) * frequency / llama3 + share * frequency
        frequencies.append(frequency)
    config = build_config(translate(f"--kv-channels 128 --rotary-base 500000 {words}").settings)
    angles = 3000 * compute_frequencies(config.model).numpy()
    np.testing.assert_allclose(angles, 3000 / linear * np.array(frequencies), rtol=1e-12)


def test_a_window_of_two_positions_before_is_that_of_the_model() -> None:
    model = Gpt(build_config(translate("--num-layers 1 --window-size 2,0").settings).model)
    tokens = torch.arange(10)[None]
    changed = tokens.clone()
    changed[0, 4] = 99
    with torch.no_grad():
        states = [model.hidden_states(ids, causal=True)[0] for ids in (tokens, changed)]
    differs = (states[0] != states[1]).any(-1)
    assert differs.nonzero().flatten().tolist() == [4, 5, 6]
