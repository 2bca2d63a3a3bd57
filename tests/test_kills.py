"""Every program that writes leaves the files of an undisturbed run after kill -9 and a restart."""

import hashlib
import json
import os
import re
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

from megatron.data.indexed_writer import IndexedWriter
from megatron.tokenizer.train_bpe import train_bpe
from tests.conftest import ROOT

LIMIT_S = 240
N_TOKENS = 200
MOMENTS = (0.35, 0.6, 0.8, 0.95)  # shares of the undisturbed run's time
TRAIN = [
    "dataset.seq_len=32", "dataset.batch_size=24", "dist.dtype=float32", "dist.cpu_only=true",
    "model.d_model=32", "model.n_heads=2", "model.n_layers=2", "optim.lr=0.01", "misc.n_threads=1",
    "lr_scheduler.total_iterations=60", "lr_scheduler.warmup_iterations=3", "evaluation.max_samples=64",
    "evaluation.every_iterations=20", "logging.every_iterations=1", "logging.tensorboard=false",
    "checkpoint.chkpt_saving_iterations=3",
]  # fmt: skip
# keys that differ from run to run although the results are equal: times, memory, commit, number of restarts
VOLATILE = {"elapsed_s", "wall_s", "git", "date", "tps", "tps_mean", "tflops", "mfu", "mfu_executed"}
VOLATILE |= {"memory_gib", "peak_gib", "generation", "files", "sha256", "time"}
CHECKPOINT = re.compile(r"\d{8}-\d{6}-\d{6}")
# logs contain a part for each start; the state of an iteration contains times
PRESENT = {"log.txt", ".metadata", ".lock", "iter_state_dict.pt", "meta.json"}

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
        for i, prefix in enumerate(self.parts):
            meta = {"tokenizer": {"n_tokens": N_TOKENS, "sha256": "random"}, "append_eod": False}
            with IndexedWriter(prefix, np.dtype(np.uint16), meta) as writer:
                noise = np.random.default_rng(i).integers(0, 3, 400_000)
                # each id follows from the previous one, so that a model learns in a few steps
                ids = (3 * np.arange(400_000) + noise) % N_TOKENS
                writer.add_documents(ids.astype(np.uint16), np.full(400, 1000))
        self.config = folder / "empty.yaml"
        self.config.write_text("name: kills\n")

    def train(self, work: Path, *changes: str) -> Words:
        """Return the command of a run of 60 steps with a checkpoint every third step."""
        data = [f"dataset.path_train={self.parts[0]}", f"dataset.path_eval={self.parts[1]}"]
        return ["pretrain", self.config, *data, *TRAIN, f"logging.run_dir={work}", *changes]


def preprocess(inputs: Inputs, work: Path) -> Words:
    words = ["--input", inputs.lines, "--output-prefix", "out", "--root", work, "--workers", 2, "--quiet"]
    return ["preprocess_data_many_cores", *words, "--tokenizer-model", inputs.tokenizer, "--append-eod"]


PROGRAMS: dict[str, Callable[[Inputs, Path], Words]] = {
    "preprocess": preprocess,
    "merge": lambda i, work: ["merge_datasets", *i.parts, "--output", work / "joined"],
    "subset of text": lambda i, work: [
        *("subset_corpus", "--input", i.lines, "--output", work / "part.jsonl.gz", "--sample", "0.5")
    ],
    "subset of tokens": lambda i, work: [
        *("subset_corpus", "--input", i.parts[0], "--output", work / "part", "--sample", "0.9")
    ],
    "train": lambda i, work: i.train(work),
    "train diffusion": lambda i, work: i.train(work, "objective.name=masked_diffusion"),
    "train sharded": lambda i, work: i.train(
        work, "checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"
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


def strip_keys(content: Any) -> Any:
    """Remove the volatile keys of JSON, recursively."""
    if isinstance(content, dict):
        return {key: strip_keys(value) for key, value in content.items() if key not in VOLATILE}
    return [strip_keys(value) for value in content] if isinstance(content, list) else content


def summarize_file(path: Path) -> str:
    """Return a hash of the parts of a file that do not differ from run to run."""
    if path.name in PRESENT:
        return "present"
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        records = [json.loads(CHECKPOINT.sub("TIME", line)) for line in lines]
        # the number of these lines depends on how often the run was started
        records = [record for record in records if record.get("kind") != "memory"]
        content = json.dumps(strip_keys(records), sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()


def summarize_folder(work: Path) -> dict[str, str]:
    """Return {relative path: summary}, with checkpoints named after their step and not the time."""
    names = {}
    for meta in work.rglob("meta.json"):
        step = json.loads(meta.read_text())["step"]
        names[meta.parent.name] = CHECKPOINT.sub(f"step-{step}", meta.parent.name)
    outcome = {}
    for path in work.rglob("*"):
        parts = [names.get(part, part) for part in path.relative_to(work).parts]
        if path.is_file():
            outcome["/".join(parts)] = summarize_file(path)
    return outcome


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
    duration_s, expected = time.monotonic() - began, summarize_folder(work)
    assert expected
    n_killed = 0
    for moment in MOMENTS[:2] if name in FAST else MOMENTS:
        shutil.rmtree(work)
        work.mkdir()
        status = run_program(words, moment * duration_s)
        n_killed += status == -signal.SIGKILL
        if status != 0:
            assert run_program(words) == 0
        assert summarize_folder(work) == expected, f"killed at {moment} of the time"
    assert n_killed, "no kill hit the running program"
