"""torchtitan's own classes with a mixture, if the package is installed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog import Catalog
from megatron.mixture.prepare import prepare_mixture
from megatron.mixture.source import TitanLoader, titan_config
from tests.conftest import free_port

LENGTHS = [5, 1, 40, 16, 3, 7, 30, 2, 25] * 6


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """Return a mixture of documents of many lengths; document i has the ids 100 i, 100 i + 1, ..."""
    return make_mixture(tmp_path, 100)


def make_mixture(tmp_path: Path, first_id: int) -> Path:
    with IndexedWriter(tmp_path / "one", np.dtype(np.uint16), {}) as writer:
        for document, n in enumerate(LENGTHS):
            writer.add_document(np.arange(n) + first_id * document)
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("one", [str(tmp_path / "one")], (), quiet=True)
    (tmp_path / "m.yaml").write_text("catalog: c\n")
    prepare_mixture(tmp_path / "m.yaml", quiet=True)
    return tmp_path / "m.yaml"


def build_loader(mixture: Path, rank: int = 0, n_ranks: int = 1) -> Any:
    """Build a loader as torchtitan's Trainer does."""
    return titan_config(mixture, seed=3).build(
        dp_world_size=n_ranks, dp_rank=rank, tokenizer=None, seq_len=16, local_batch_size=4 // n_ranks,
        snapshot_every_n_steps=None,
    )  # fmt: skip


def test_a_loader_is_built_from_torchtitans_config_and_resumes(mixture) -> None:
    name = "torchtitan.components.dataloader"
    package = pytest.importorskip(name, reason=f"{name} cannot be imported", exc_type=ImportError)
    loader = build_loader(mixture)
    assert isinstance(loader, package.BaseDataLoader)
    reading, plain = iter(loader), iter(TitanLoader(mixture, 16, 4, 0, 1, seed=3))
    for _ in range(3):
        (inputs, labels), (same, same_labels) = next(reading), next(plain)
        assert set(inputs) == {"input", "positions"}
        assert all(torch.equal(inputs[key], same[key]) for key in inputs)
        assert torch.equal(labels, same_labels)
    halves = [build_loader(mixture, rank, 2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(loader.state_dict())
    parts = [next(iter(half))[1] for half in halves]
    assert torch.equal(torch.cat(parts), next(plain)[1])
    assert titan_config(mixture).to_dict()["dataset_path"] == str(mixture)
    with pytest.raises(ValueError, match=r"dataloader\.dataset_path: got None"):
        config = titan_config(mixture)
        config.dataset_path = None
        config.build(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=16, local_batch_size=4)


def test_torchtitan_document_masks_prevent_attention_across_documents(mixture) -> None:
    name = "torchtitan.models.common.attention"
    attention = pytest.importorskip(name, reason=f"{name} cannot be imported", exc_type=ImportError)
    inputs, _ = next(iter(TitanLoader(mixture, 16, 4, 0, 1, seed=3)))
    mask = attention.get_document_mask_mod(inputs["positions"])
    documents = inputs["input"] // 100
    for row in range(4):
        for query in range(16):
            for key in range(16):
                sees = bool(mask(torch.tensor(row), torch.tensor(0), torch.tensor(query), torch.tensor(key)))
                assert sees == bool(documents[row, query] == documents[row, key])


def run_torchtitan(folder: Path, *words: object, n_ranks: int = 1) -> dict[str, Any] | None:
    """Run torchtitan's trainer, and return what rank 0 printed; None if it was killed."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={n_ranks}", f"--master-port={free_port()}"]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = Path(__file__).with_name("torchtitan_on_cpu.py")
    arguments = [script, folder.parent / "m.yaml", folder, *words]
    command = [sys.executable, *(launch if n_ranks > 1 else []), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
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
