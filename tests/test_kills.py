"""Every program that writes leaves what an undisturbed run leaves after kill -9 and a restart."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron.tokenizer.train_bpe import train_bpe
from tests.conftest import ROOT
from tests.datasets import write_dataset
from tests.train.conftest import list_saved, read_losses

LIMIT_S = 240
TRAIN = [
    "dataset.seq_len=32", "dataset.batch_size=24", "dist.dtype=float32", "dist.cpu_only=true",
    "model.d_model=32", "model.n_heads=2", "model.n_layers=2", "optim.lr=0.01", "misc.n_threads=1",
    "lr_scheduler.total_iterations=60", "lr_scheduler.warmup_iterations=3", "evaluation.max_samples=64",
    "evaluation.every_iterations=20", "logging.every_iterations=1", "logging.tensorboard=false",
    "checkpoint.chkpt_saving_iterations=3",
]  # fmt: skip
MOMENTS = (0.35, 0.6)  # shares of the undisturbed run's time
Words = list[object]


class Inputs:
    """Small inputs of all programs, made once."""

    def __init__(self, folder: Path) -> None:
        self.lines, self.tokenizer = folder / "lines.jsonl", folder / "tokenizer"
        rng = np.random.default_rng(0)
        words = np.array(["red", "fish", "blue", "12", "one", "two\n", "über", "data"])
        texts = [" ".join(words[rng.integers(len(words), size=300)]) for _ in range(4000)]
        records = [{"text": f"{i} {text}", "stars": i} for i, text in enumerate(texts)]
        self.lines.write_text("".join(json.dumps(record) + "\n" for record in records))
        train_bpe(texts[:200], 270, self.tokenizer)
        self.parts = [folder / f"part-{i}" for i in range(4)]
        meta = {"tokenizer": {"n_tokens": 200, "sha256": "random"}, "append_eod": False}
        for prefix in self.parts:
            write_dataset(prefix, rng.integers(0, 200, (400, 1000)), meta)
        self.config = folder / "empty.yaml"
        self.config.write_text("name: kills\n")


def preprocess(inputs: Inputs, work: Path) -> Words:
    words = ["--input", inputs.lines, "--output-prefix", "out", "--root", work, "--workers", 2, "--quiet"]
    return ["preprocess_data_many_cores", *words, "--tokenizer-model", inputs.tokenizer, "--append-eod"]


def train(inputs: Inputs, work: Path, *changes: str) -> Words:
    """Return the command of a run of 60 steps with a checkpoint every third step."""
    data = [f"dataset.path_train={inputs.parts[0]}", f"dataset.path_eval={inputs.parts[1]}"]
    return ["pretrain", inputs.config, *data, *TRAIN, f"logging.run_dir={work}", *changes]


PROGRAMS: dict[str, Callable[[Inputs, Path], Words]] = {
    "preprocess": preprocess,
    "merge": lambda i, work: ["merge_datasets", *i.parts, "--output", work / "joined"],
    "subset of text": lambda i, work: [
        *("subset_corpus", "--input", i.lines, "--output", work / "part.jsonl.gz", "--sample", "0.5")
    ],
    "subset of tokens": lambda i, work: [
        *("subset_corpus", "--input", i.parts[0], "--output", work / "part", "--sample", "0.9")
    ],
    "train": train,
    "train diffusion": lambda i, work: train(i, work, "objective.name=masked_diffusion"),
    "train sharded": lambda i, work: train(
        i, work, "checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"
    ),
}
FAST = {"preprocess", "merge"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def run_program(words: Words, kill_after_s: float | None = None) -> int:
    """Run a program, and kill all its processes after a time; return its exit status."""
    name, *arguments = map(str, words)
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = {"start_new_session": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=environment, **options)
    try:
        return process.wait(LIMIT_S if kill_after_s is None else kill_after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def read_files(work: Path) -> dict[str, Any]:
    """Return {relative path: content} of all files but locks; of a run its losses and the tensors it saved.

    The other files of a run contain times.
    """
    if (work / "result.json").exists():
        outcome: dict[str, Any] = {kind: read_losses(work, kind) for kind in ("train", "validation")}
        for saved in list_saved(work):
            state = {path.name: path.read_bytes() for path in saved.path.glob("model*")}
            for path in saved.path.glob("*.safetensors"):  # in any order
                state |= {name: tensor.tobytes() for name, tensor in load_file(path).items()}
            outcome[str(saved.step)] = state
        return outcome
    files = [path for path in work.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(work)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in PROGRAMS]
)
def test_a_killed_and_restarted_program_leaves_the_files_of_an_undisturbed_run(
    name: str, inputs: Inputs, tmp_path: Path
) -> None:
    # the folder has the same path in each trial, because programs store paths in their files
    work = tmp_path / "work"
    words = PROGRAMS[name](inputs, work)
    work.mkdir()
    began = time.monotonic()
    assert run_program(words) == 0
    duration_s, expected = time.monotonic() - began, read_files(work)
    assert expected
    n_killed = 0
    for moment in MOMENTS:
        shutil.rmtree(work)
        work.mkdir()
        status = run_program(words, moment * duration_s)
        n_killed += status == -signal.SIGKILL
        if status != 0:
            assert run_program(words) == 0
        assert read_files(work) == expected, f"killed at {moment} of the time"
    assert n_killed, "no kill hit the running program"
