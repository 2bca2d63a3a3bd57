"""Fixtures: a small corpus, a small run, and starting runs in this process or on several ranks."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from megatron.checkpoint import layout
from megatron.parallel.world import World
from megatron.plan.resolve import load_config
from megatron.plan.run_dir import read_metrics
from megatron.plan.run_plan import plan_run
from megatron.study.launchers.launch import read_last_metrics
from megatron.train import loop
from megatron.train.build import Run, build_run
from tests.conftest import load_newest
from tests.datasets import write_dataset
from tests.rank_processes import Rank, run_tool, start_ranks, stop_ranks
from tests.tool_modules import Cli, CliResult

N_TOKENS = 200
ALONE = World(0, 1, 0, torch.device("cpu"))
MDM = "objective.name=masked_diffusion"
COMMON = [
    "dist.dtype=float32", "dist.cpu_only=true", "logging.every_iterations=1", "logging.tensorboard=false",
    "misc.n_threads=1",
]  # fmt: skip


def write_corpus(prefix: Path, n_documents: int, seed: int) -> None:
    """Write documents whose tokens follow from the previous one, with noise: the loss can decrease."""
    rng, documents = np.random.default_rng(seed), []
    for _ in range(n_documents):
        length = int(rng.integers(20, 60))
        first, noise = int(rng.integers(N_TOKENS)), rng.integers(0, 3, length)
        documents.append((first + 3 * np.arange(length) + noise) % N_TOKENS)
    write_dataset(prefix, documents, {"tokenizer": {"n_tokens": N_TOKENS}})


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the datasets `train` and `held_out`: about 4,000 and 1,200 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "train", 100, seed=0)
    write_corpus(folder / "held_out", 30, seed=1)
    return folder


@pytest.fixture
def blend(corpus: Path, tmp_path: Path) -> list[str]:
    """Changes of the small run for two corpora: 12 steps of 24 samples, 3 : 1."""
    path = tmp_path / "blend.txt"
    path.write_text(f"3 {corpus / 'train'}\n1 {corpus / 'held_out'}\n")
    return [f"dataset.path_train={path}", f"dataset.path_eval={path}"]


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration that the arguments complete."""
    path = tmp_path_factory.mktemp("config") / "empty.yaml"
    path.write_text("name: test\n")
    return path


@pytest.fixture(scope="session")
def words(corpus: Path) -> list[str]:
    """key=value arguments of a run of 12 steps: slightly more than two epochs."""
    return [
        *COMMON, f"dataset.path_train={corpus / 'train'}", f"dataset.path_eval={corpus / 'held_out'}",
        "dataset.seq_len=32", "dataset.batch_size=24", "model.d_model=32", "model.n_heads=2",
        "model.n_layers=2", "optim.lr=0.01", "lr_scheduler.total_iterations=12",
        "lr_scheduler.warmup_iterations=3", "evaluation.num_mc=2",
    ]  # fmt: skip


def save_every(n_steps: int) -> str:
    """Return the setting to save a checkpoint after every `n_steps`."""
    return f"checkpoint.chkpt_saving_iterations={n_steps}"


Pretrain = Callable[..., CliResult]
Start = Callable[..., list[Rank]]
SmallRun = Callable[..., Run]


@pytest.fixture
def start(words: list[str], config_file: Path, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts training on gloo ranks, and kill the rest at teardown.

    Its arguments: folder of the run, changes of the configuration, and `change`, a function that
    patches the processes first.
    """
    everything: list[Rank] = []

    def start_training(
        run: Path, *changes: str, n_ranks: int = 2, change: Callable[[], None] | None = None
    ) -> list[Rank]:
        argv = [str(config_file), *words, f"logging.run_dir={run}", *changes]
        ranks = start_ranks(run_tool, "pretrain.py", argv, change, n_ranks=n_ranks, folder=tmp_path / "logs")
        everything.extend(ranks)
        return ranks

    yield start_training
    stop_ranks(everything)


@pytest.fixture
def pretrain(start: Start, words: list[str], config_file: Path, cli: Cli) -> Pretrain:
    """Train to the end, a single rank in this process; check the status and return rank 0's output."""

    def run_to_end(
        run: Path, *changes: str, n_ranks: int = 1, status: int = 0, change: Callable[[], None] | None = None
    ) -> CliResult:
        if n_ranks == 1 and change is None:
            with patch.object(loop, "gc"):  # the heap of the tests is large, and collected at every start
                return cli("train", config_file, *words, f"logging.run_dir={run}", *changes, status=status)
        result = [rank.wait() for rank in start(run, *changes, n_ranks=n_ranks, change=change)][0]
        assert result.status == status, result.error
        return result

    return run_to_end


@pytest.fixture
def small_run(words: list[str], config_file: Path) -> SmallRun:
    """Return a function that builds a run of a single rank: (folder, changes) -> run."""

    def build_small_run(run: Path, *changes: str) -> Run:
        config = load_config(config_file, [*words, f"logging.run_dir={run}", *changes])
        return build_run(config, plan_run(config), ALONE)

    return build_small_run


def read_lines(run: Path, kind: str = "train") -> list[dict]:
    """Return the lines of a kind in a run's metrics."""
    return [line for line in read_metrics(run) if line["kind"] == kind]


def read_losses(run: Path, kind: str = "train") -> list[float]:
    """Return the logged losses of a run, in order."""
    return [line["loss"] for line in read_lines(run, kind)]


def list_saved(run: Path) -> list[layout.CheckpointInfo]:
    """Return the complete checkpoints of a run, in order."""
    return layout.find_checkpoints(run / "checkpoints")


def read_error(result: CliResult) -> str:
    """Return the last line of a program's standard error."""
    return result.error.strip().splitlines()[-1]


def read_step(run: Path) -> int:
    """Return the step of the last line of a run's metrics, 0 before the first."""
    return (read_last_metrics(run) or {"step": 0})["step"]


def remove_end(run: Path) -> None:
    """Remove the last checkpoint and the result of a run, as if it had been killed before."""
    shutil.rmtree(list_saved(run)[-1].path)
    (run / "result.json").unlink()


def assert_same_losses(run: Path, expected: Path, error: float = 1e-5) -> None:
    """Assert that losses of training and held-out losses are equal up to rounding."""
    for kind in ("train", "validation"):
        losses = read_losses(expected, kind)
        assert losses and read_losses(run, kind) == pytest.approx(losses, abs=error), kind


def assert_same_weights(run: Path, expected: Path) -> None:
    """Assert that the last checkpoints of two runs have bit-equal weights."""
    newest = [load_newest(folder / "checkpoints", "step") for folder in (run, expected)]
    ours, theirs = (checkpoint[1]["model"] for checkpoint in newest if checkpoint is not None)
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name
