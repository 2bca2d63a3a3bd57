"""Megatron's commands as typed: through the translator, directly, and under the launchers."""

import json
from pathlib import Path

import numpy as np
import yaml

from megatron.plan.run_dir import PLAN, RESULT
from tests.datasets import write_dataset
from tests.tool_modules import Cli

SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--use-rotary-position-embeddings --swiglu --normalization RMSNorm --disable-bias-linear "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--clip-grad 1.0 --log-interval 1 --num-workers 0"
)
SAMPLES = "--train-samples 26 --lr-decay-samples 26 --lr-warmup-samples 8"
CPU = ["dist.cpu_only=true", "misc.n_threads=1"]


def write_corpus(prefix: Path, sidecar: bool = True) -> None:
    rng = np.random.default_rng(0)
    write_dataset(prefix, rng.integers(0, 90, (40, 60)), {"tokenizer": {"n_tokens": 90, "sha256": "a"}})
    if not sidecar:
        Path(f"{prefix}.json").unlink()


def read_result(folder: Path) -> dict:
    return json.loads((folder / RESULT).read_text())


def test_a_script_becomes_a_configuration_that_trains(cli: Cli, root: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    (tmp_path / "train.sh").write_text(
        f'SAVE=$1\nARGS="{SHAPE} {SAMPLES}"\ntorchrun pretrain_diff_gpt.py $ARGS --data-path {tmp_path}/c '
        "--split 90,10,0 --eval-iters 1 --hidden-dropout 0 --attention-dropout 0 --save $SAVE\n"
    )
    out, folder = tmp_path / "run.yaml", tmp_path / "run"
    words = ["--script", tmp_path / "train.sh", "--execute", "--out", out, "--", folder]
    output = cli("megatron", *words, cwd=root).output
    assert "--train-samples 26" in output
    assert yaml.safe_load(out.read_text())["objective"]["name"] == "masked_diffusion"
    (first,) = [line for line in output.splitlines() if line.startswith("first: python tools/")]
    cli(*first.removeprefix("first: python tools/").split(), cwd=root)
    cli("train", out, *CPU)
    assert read_result(folder)["step"] == 6
    assert json.loads((folder / PLAN).read_text())["objective"] == "masked_diffusion"


def test_an_unsupported_argument_ends_the_command_and_writes_nothing(cli: Cli, tmp_path: Path) -> None:
    words = [*SHAPE.split(), *SAMPLES.split(), "--mock-data", "--vocab-size", "90", "--num-experts", "8"]
    reason = "--num-experts: not supported, no mixture of experts"
    assert f"{reason}. Change" in cli("megatron", "--out", tmp_path / "x.yaml", "--", *words, status=1).error
    assert f"error: {reason}" in cli("gpt", *words, "--save", tmp_path / "run", status=1).error
    assert list(tmp_path.iterdir()) == []
    error = cli("gpt", "--num-layer", "3", status=2).error
    assert "--num-layer: not supported, see examples_scaling/MIGRATE.md" in error


def test_tokens_without_a_sidecar_train_after_the_hint_of_the_error(cli: Cli, tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", sidecar=False)
    folder = tmp_path / "run"
    words = [*SHAPE.split(), "--train-iters", "2", "--data-path", tmp_path / "c", "--split", "100"]
    words += ["--hidden-dropout", "0.1", "--attention-dropout", "0", "--save", folder, *CPU]
    assert "Set it, as in model.n_tokens=50257." in cli("gpt", *words, status=1).error
    cli("gpt", *words, "model.n_tokens=90")
    assert read_result(folder)["step"] == 2
