"""Fixtures: a small corpus, a small run, and starting runs from the command line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint import layout
from megatron.data.indexed_writer import IndexedWriter
from megatron.parallel.world import World
from megatron.plan.resolve import load_config
from megatron.plan.run_dir import read_metrics
from megatron.plan.run_plan import plan_run
from megatron.train.build import Run, build_run
from tests.conftest import free_port

N_TOKENS = 200
ALONE = World(0, 1, 0, torch.device("cpu"))


def write_corpus(prefix: Path, n_documents: int, seed: int) -> None:
    """Write documents whose tokens follow from the previous one, with noise: the loss can decrease."""
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.dtype(np.uint16), {"tokenizer": {"n_tokens": N_TOKENS}}) as writer:
        for _ in range(n_documents):
            length = int(rng.integers(20, 60))
            ids = (
                int(rng.integers(N_TOKENS)) + 3 * np.arange(length) + rng.integers(0, 3, length)
            ) % N_TOKENS
            writer.add_document(ids)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the datasets `train` and `held_out`: about 4,000 and 1,200 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "train", 100, seed=0)
    write_corpus(folder / "held_out", 30, seed=1)
    return folder


@pytest.fixture
def words(corpus: Path) -> list[str]:
    """key=value arguments of a run of 12 steps: slightly more than two epochs."""
    return [
        f"dataset.path_train={corpus / 'train'}",
        f"dataset.path_eval={corpus / 'held_out'}",
        "dataset.seq_len=32",
        "dataset.batch_size=24",
        "model.d_model=32",
        "model.n_heads=2",
        "model.n_layers=2",
        "optim.lr=0.01",
        "lr_scheduler.total_iterations=12",
        "lr_scheduler.warmup_iterations=3",
        "dist.dtype=float32",
        "dist.cpu_only=true",
        "logging.every_iterations=1",
        "logging.tensorboard=false",
        "misc.n_threads=1",
        "evaluation.num_mc=2",
    ]


Pretrain = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread, as misc.n_threads of the small run: on a busy machine two can block for minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Iterator[Start]:
    """Start tools/pretrain.py, or another script, on one or more gloo ranks; kill the rest at teardown."""
    everything: list[subprocess.Popen[str]] = []

    def start_ranks(
        words: list[str], n_ranks: int = 1, script: Path | None = None
    ) -> list[subprocess.Popen[str]]:
        config = tmp_path / "empty.yaml"
        config.write_text("name: test\n")
        command = [sys.executable, str(script or root / "tools" / "pretrain.py"), str(config), *words]
        shared = {**os.environ, "OMP_NUM_THREADS": "1"}
        if n_ranks > 1:
            shared |= {
                "WORLD_SIZE": str(n_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
            }
        started = [
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=shared if n_ranks == 1 else {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(n_ranks)
        ]
        everything.extend(started)
        return started

    yield start_ranks
    for process in everything:
        process.kill()
        process.wait()


@pytest.fixture
def pretrain(start: Start) -> Pretrain:
    """Run to the end, as `start`; return rank 0's exit status and output."""

    def run_to_end(
        words: list[str], n_ranks: int = 1, timeout_s: float = 300, script: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        started = start(words, n_ranks, script)
        outputs = [process.communicate(timeout=timeout_s) for process in started]
        return subprocess.CompletedProcess(started[0].args, started[0].returncode, *outputs[0])

    return run_to_end


def read_losses(run: Path, kind: str = "train") -> list[float]:
    """Return the logged losses of a run, in order."""
    return [line["loss"] for line in read_metrics(run) if line["kind"] == kind]


def remove_end(run: Path) -> None:
    """Remove the last checkpoint and the result of a run, as if it had been killed before."""
    shutil.rmtree(layout.find_checkpoints(run / "checkpoints", "step")[1].path)
    (run / "result.json").unlink()


def build_small_run(words: list[str], folder: Path) -> Run:
    """Build a run of one rank in this process."""
    (folder / "empty.yaml").write_text("name: test\n")
    config = load_config(folder / "empty.yaml", words)
    return build_run(config, plan_run(config), ALONE)
