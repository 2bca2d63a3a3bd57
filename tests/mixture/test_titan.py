"""TitanLoader: batches of torchtitan's form, the same on every number of ranks and after a restart."""

import hashlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.mixture.prepare import prepare_mixture
from megatron.mixture.source import TitanLoader, titan_config
from tests.conftest import free_port, run_process
from tests.datasets import write_dataset
from tests.mixture.conftest import register

LENGTHS = [5, 1, 40, 16, 3, 7, 30, 2, 25] * 6


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A mixture of documents of many lengths; document i has the ids 100 i, 100 i + 1, ..."""
    return make_mixture(tmp_path, 100)


def make_mixture(tmp_path: Path, first_id: int) -> Path:
    documents = [first_id * i + np.arange(n) for i, n in enumerate(LENGTHS)]
    prefix = write_dataset(tmp_path / "one", documents)
    register(tmp_path / "c", [prefix], ())
    (tmp_path / "m.yaml").write_text("catalog: c\n")
    prepare_mixture(tmp_path / "m.yaml", quiet=True)
    return tmp_path / "m.yaml"


def load(mixture: Path, rank: int = 0, n_ranks: int = 1) -> TitanLoader:
    return TitanLoader(mixture, 16, 4 // n_ranks, rank, n_ranks, seed=3)


def test_positions_count_from_0_in_each_document_and_labels_are_the_next_tokens(mixture: Path) -> None:
    inputs, labels = next(iter(load(mixture)))
    tokens, positions = inputs["input"], inputs["positions"]
    assert tokens.shape == positions.shape == labels.shape == (4, 16)
    assert torch.equal(labels[:, :-1], tokens[:, 1:])
    follows = tokens[:, 1:] == tokens[:, :-1] + 1  # in the same document
    assert 0 < follows.sum() < follows.numel()
    assert torch.equal(positions[:, 1:], torch.where(follows, positions[:, :-1] + 1, 0))
    assert not positions[:, 0].any()


def test_a_loader_resumes_on_another_number_of_ranks(mixture: Path) -> None:
    whole = load(mixture)
    expected = [labels for _, (_, labels) in zip(range(6), whole, strict=False)]
    state: dict = {}
    for n_ranks, at in ((1, 0), (2, 2), (4, 3), (1, 5)):
        loaders = [load(mixture, rank, n_ranks) for rank in range(n_ranks)]
        for loader in loaders:
            loader.load_state_dict(state)
        batches = [next(iter(loader))[1] for loader in loaders]
        assert torch.equal(torch.cat(batches), expected[at])
        if at in (0, 3):
            next(iter(loaders[0]))
        state = loaders[0].state_dict()
    with pytest.raises(ValueError, match="seq_len: got 8, expected the saved 16"):
        TitanLoader(mixture, 8, 4, 0, 1, seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match="global_batch_size: got 6, expected a multiple of 4 x 1"):
        TitanLoader(mixture, 16, 4, 0, 1, global_batch_size=6)


def test_torchtitan_builds_a_loader_from_its_config(mixture: Path) -> None:
    name = "torchtitan.components.dataloader"
    pytest.importorskip(name, reason=f"{name} cannot be imported", exc_type=ImportError)
    sizes = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 16, "local_batch_size": 4, "tokenizer": None}
    config = titan_config(mixture, seed=3)
    assert torch.equal(next(iter(config.build(**sizes)))[1], next(iter(load(mixture)))[1])
    config.dataset_path = None
    with pytest.raises(ValueError, match=r"dataloader\.dataset_path: got None"):
        config.build(**sizes)


def run_torchtitan(folder: Path, *words: object, n_ranks: int = 1) -> dict[str, Any] | None:
    """Run torchtitan's trainer, and return what rank 0 printed; None if it was killed."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={n_ranks}", f"--master-port={free_port()}"]
    arguments = [Path(__file__).with_name("torchtitan_on_cpu.py"), folder.parent / "m.yaml", folder, *words]
    command = [sys.executable, *(launch if n_ranks > 1 else []), *arguments]
    done = run_process(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # five starts of torchtitan
def test_torchtitans_trainer_trains_and_resumes_on_another_number_of_ranks(tmp_path) -> None:
    pytest.importorskip("torchtitan.trainer", reason="torchtitan is not installed", exc_type=ImportError)
    mixture = make_mixture(tmp_path, 37)  # torchtitan's smallest model has 2,048 ids
    whole = run_torchtitan(tmp_path / "whole", 6)
    assert whole is not None
    assert [n for n, _ in whole["batches"]] == [4, 8, 12, 16, 20, 24]
    # batches of the loader without torchtitan
    batches = iter(TitanLoader(mixture, 32, 4, 0, 1, seed=3))
    for _, sums in whole["batches"]:
        inputs, labels = next(batches)
        content = b"".join(t.numpy().tobytes() for t in (inputs["input"], inputs["positions"], labels))
        assert hashlib.sha256(content).hexdigest() == sums
    # killed in step 6, after the checkpoint of step 4: steps 5 and 6 are repeated exactly
    assert run_torchtitan(tmp_path / "killed", 6, 5) is None
    resumed = run_torchtitan(tmp_path / "killed", 6)
    assert resumed is not None
    assert resumed["batches"] == whole["batches"][4:]
    assert resumed["losses"] == whole["losses"][4:]
    # two ranks save, one rank resumes
    halves = run_torchtitan(tmp_path / "two", 4, n_ranks=2)
    assert halves is not None
    assert [n for n, _ in halves["batches"]] == [4, 8, 12, 16]
    alone = run_torchtitan(tmp_path / "two", 6)
    assert alone is not None
    assert alone["batches"] == whole["batches"][4:]
