"""Arguments of published scripts with tensor or pipeline parallelism: training accepts what they become."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron.config.migration.megatron_command import translate_command
from megatron.config.migration.translate import Translation
from megatron.config.migration.write_translation import format_rows, write_translation
from megatron.config.parallelism import build_layout
from megatron.plan.resolve import load_config
from megatron.plan.run_plan import plan_run
from megatron.train.microbatch import list_microbatches

GPT_1B = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16"
SEQ_2K = "--seq-length 2048 --max-position-embeddings 2048"
LLAMA = (
    f"{GPT_1B} --ffn-hidden-size 5504 {SEQ_2K} --swiglu --normalization rmsnorm --disable-bias-linear "
    "--use-rotary-position-embeddings --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --train-iters 250000 --bf16 --zero-stage=0 --deepspeed"
)
TOKENS = "--train-tokens 300000000000 --train-samples 292968750 --fp16 --checkpoint-activations --deepspeed"
# script -> (its ranks, or those of its name; its shape, batch, length, precision and layout)
PUBLISHED: dict[str, tuple[int, str]] = {
    "Megatron-DeepSpeed pretrain_llama_distributed": (
        8, f"{LLAMA} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4 "
        "--global-batch-size 32"),
    "Megatron-DeepSpeed pretrain_llama2_distributed": (
        8, f"{LLAMA} --num-key-value-heads 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--micro-batch-size 4 --global-batch-size 32"),
    "Megatron-DeepSpeed MoE 1.3B_dense": (
        64, f"{GPT_1B} {SEQ_2K} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 "
        f"--micro-batch-size 2 --global-batch-size 512 {TOKENS}"),
    "Megatron-DeepSpeed rebase 125M": (
        64, f"--num-layers 12 --hidden-size 768 --num-attention-heads 12 {SEQ_2K} {TOKENS} --zero-stage 1 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 2 "
        "--global-batch-size 256"),
    "Megatron-DeepSpeed rebase 1.3B_rope": (
        64, f"{GPT_1B} {SEQ_2K} {TOKENS} --zero-stage 1 --use-rotary-position-embeddings "
        "--rotary-percent 0.25 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 "
        "--micro-batch-size 2 --global-batch-size 512"),
    "Megatron-DeepSpeed long sequences": (
        2, f"{GPT_1B} {SEQ_2K} {TOKENS} --zero-stage 0 --sequence-parallel --no-pipeline-parallel "
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --micro-batch-size 1 "
        "--global-batch-size 2"),
    "Megatron-DeepSpeed zero bubble": (
        8, f"{GPT_1B} {SEQ_2K} {TOKENS} --zero-stage 0 --tensor-model-parallel-size 1 "
        "--pipeline-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 16"),
    "Megatron-LM gpt3 175b": (
        128, f"--num-layers 96 --hidden-size 12288 --num-attention-heads 96 {SEQ_2K} --train-iters 500000 "
        "--fp16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --micro-batch-size 1 "
        "--global-batch-size 1536"),
    "Megatron-LM mixtral, dense": (
        32, "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--seq-length 4096 --max-position-embeddings 32768 --swiglu --normalization RMSNorm "
        "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
        "--group-query-attention --num-query-groups 8 --attention-dropout 0 --hidden-dropout 0 "
        "--train-iters 500000 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 1 "
        "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 256"),
    "BigScience tr1-13B": (
        256, f"--num-layers 40 --hidden-size 5120 --ffn-hidden-size 20480 --num-attention-heads 32 {SEQ_2K} "
        "--train-samples 300_000_000 --fp16 --checkpoint-activations --deepspeed --zero-stage 1 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 "
        "--global-batch-size 1024"),
    "BigScience tr3d-1B3": (
        64, f"{GPT_1B} --ffn-hidden-size 8192 {SEQ_2K} --train-samples 73_242_187 --fp16 --deepspeed "
        "--checkpoint-activations --zero-stage 1 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 4 --micro-batch-size 8 --global-batch-size 512"),
    "BigScience tr12a-1B3": (
        64, f"{GPT_1B} --ffn-hidden-size 8192 {SEQ_2K} --train-samples 146_484_375 --fp16 --deepspeed "
        "--checkpoint-activations --zero-stage 1 --tensor-model-parallel-size 1 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 512"),
}  # fmt: skip
DATA = "--lr 2e-4 --min-lr 1e-5 --lr-decay-style cosine --data-path text --split 949,50,1"


def read_as_training_does(translation: Translation, n_ranks: int, folder: Path) -> Any:
    """Return the configuration after every check that tools/pretrain.py makes before it builds a model."""
    write_translation(translation, folder / "run.yaml")
    no_files = ["dataset.path_train=synthetic", "dataset.path_eval=null", "dataset.order=epoch"]
    config = load_config(folder / "run.yaml", [*no_files, "model.n_tokens=50257"])
    plan_run(config)
    layout = build_layout(config.dist, n_ranks)
    list_microbatches(config, cast(Any, SimpleNamespace(dp_size=layout.data, layout=layout)))
    return config


@pytest.mark.parametrize("script", PUBLISHED)
def test_training_accepts_the_translation_of_a_published_split_as_zero3(script: str, tmp_path: Path) -> None:
    n_ranks, arguments = PUBLISHED[script]
    translation = translate_command(f"{arguments} {DATA}".split(), n_ranks=n_ranks)
    assert not translation.refused
    config = read_as_training_does(translation, n_ranks, tmp_path)
    dist = config.dist
    assert (dist.sharding_stage, dist.tensor_parallel, dist.pipeline_parallel) == ("zero3", 1, 1)
    words = arguments.split()
    assert config.dataset.batch_size == int(words[words.index("--global-batch-size") + 1])
    tensor = int(words[words.index("--tensor-model-parallel-size") + 1])
    assert config.model.vocab_rows == -(-50257 // (128 * tensor)) * 128 * tensor  # as Megatron pads
    (reason,) = {
        row.text.rpartition("samples: ")[2]
        for row in translation.rows
        if "dist.sharding_stage=zero3; unsplit, on ranks" in row.text
    }
    untied = "model.tied_embedding=False, expected True"
    assert reason.endswith(untied if "--untie" in arguments else "model.norm='layernorm', expected 'rmsnorm'")
    assert reason in format_rows(translation.rows)


@pytest.mark.parametrize("size", ["--tensor-model-parallel-size 3", "--context-parallel-size 3"])
def test_a_size_that_does_not_divide_the_heads_becomes_zero3_too(size: str, tmp_path: Path) -> None:
    llama = LLAMA.replace("--untie-embeddings-and-output-weights", "").replace("--deepspeed", "")
    words = f"{llama} {DATA} --global-batch-size 12 --cp-comm-type a2a {size}"
    config = read_as_training_does(translate_command(words.split()), 3, tmp_path)
    assert (config.dist.sharding_stage, config.dist.tensor_parallel) == ("zero3", 1)


def test_a_split_that_training_accepts_stays(tmp_path: Path) -> None:
    llama = LLAMA.replace("--untie-embeddings-and-output-weights", "")
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4"
    translation = translate_command(f"{llama} {DATA} --global-batch-size 32 {sizes}".split())
    dist = read_as_training_does(translation, 8, tmp_path).dist
    assert (dist.sharding_stage, dist.tensor_parallel, dist.pipeline_parallel) == ("zero0", 2, 2)
    assert translation.settings["dataset"]["microbatch_size"] == 4


def test_a_fault_beside_the_split_is_left_to_training(tmp_path: Path) -> None:
    llama = LLAMA.replace("--use-rotary-position-embeddings", "").replace("embeddings 2048", "embeddings 64")
    words = f"{llama} {DATA} --global-batch-size 32 --tensor-model-parallel-size 2"
    with pytest.raises(ValueError, match="64 learned positions, expected 2048"):
        read_as_training_does(translate_command(words.split()), 2, tmp_path)
