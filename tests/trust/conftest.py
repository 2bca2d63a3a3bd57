"""A valid checkpoint, the target of hostile files, and checksums that are updated as by an attacker."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import layout, reshard
from megatron.config.schema import ModelConfig
from megatron.model.transformer import Gpt
from tests.conftest import save_checkpoint

SHAPE = ModelConfig(d_model=16, n_heads=2, n_layers=1, d_head=8, d_ff=32, n_tokens=50, vocab_rows=64)


def seal(checkpoint: Path) -> None:
    """Rewrite meta.json with the checksums of the folder's current files."""
    meta = json.loads((checkpoint / layout.META).read_text())
    meta.pop(layout.META_CHECKSUM)
    for path in checkpoint.iterdir():
        if path.name != layout.META:
            content = path.read_bytes()
            meta["files"][path.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    sealed = {**meta, layout.META_CHECKSUM: layout.compute_meta_checksum(meta)}
    (checkpoint / layout.META).write_text(json.dumps(sealed, indent=1))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return the path that hostile files try to create."""
    return tmp_path / "it_ran"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Save a run's checkpoint in the full layout."""
    torch.manual_seed(0)
    state = Gpt(SHAPE).state_dict()
    moments = {
        name: {"exp_avg": torch.zeros_like(of), "step": torch.tensor(3.0)} for name, of in state.items()
    }
    meta = {
        "identity": "abc",
        "step": 3,
        "config": {
            "model": asdict(SHAPE),
            "objective": {"name": "autoregressive"},
            "dataset": {"seq_len": 32},
        },
    }
    parts = {"model": state, "optim": {"state": moments}, "lr": {"step": 3}, "iter": {"step": 3}}
    return save_checkpoint(tmp_path / "full", "step", parts, meta)


@pytest.fixture
def shards(full: Path, tmp_path: Path) -> Path:
    """Convert the checkpoint to the sharded layout."""
    path = tmp_path / "shards" / full.name
    reshard.reshard_to_sharded(full, path)
    return path
