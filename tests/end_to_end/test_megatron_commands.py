"""Megatron's commands as typed: through the translator, directly, and under the launchers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from megatron.data.indexed_writer import IndexedWriter
from megatron.plan.run_dir import PLAN, RESULT
from tests.conftest import free_port
from tests.tool_modules import Cli

LIMIT_S = 240
SHAPE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--use-rotary-position-embeddings --swiglu --normalization RMSNorm --disable-bias-linear "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--clip-grad 1.0 --log-interval 1 --num-workers 0"
)
SAMPLES = "--train-samples 26 --lr-decay-samples 26 --lr-warmup-samples 8"
CPU = ["dist.cpu_only=true", "misc.n_threads=1"]


def write_corpus(prefix: Path, sidecar: bool = True, n_documents: int = 40) -> None:
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype("<u2"), {"tokenizer": {"n_tokens": 90, "sha256": "a"}}) as writer:
        for _ in range(n_documents):
            writer.add_document(rng.integers(0, 90, 60))
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


def test_an_unsupported_argument_ends_the_command_before_anything_is_written(
    cli: Cli, tmp_path: Path
) -> None:
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


LAUNCHERS = {
    "torch.distributed.launch": ["-m", "torch.distributed.launch", "--nproc_per_node=2"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus=2"],
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launchers_of_megatron_start_its_commands(root: Path, tmp_path: Path, launcher: str) -> None:
    words = [*SHAPE.split(), *SAMPLES.split(), "--mock-data", "--vocab-size", "90"]
    words += ["--save", str(tmp_path / "run"), "--hidden-dropout", "0", "--attention-dropout", "0", *CPU]
    if launcher == "deepspeed":
        pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")
        theirs = {
            "train_micro_batch_size_per_gpu": 2, "train_batch_size": 4, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "steps_per_print": 2000,
        }  # fmt: skip
        (tmp_path / "ds.json").write_text(json.dumps(theirs))
        words += ["--bf16", "--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json"), "--zero-stage=0"]
    port = f"--master_port={free_port()}"
    command = [sys.executable, *LAUNCHERS[launcher], port, "tools/pretrain_gpt.py", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (read_result(tmp_path / "run")["n_ranks"], read_result(tmp_path / "run")["step"]) == (2, 6)
