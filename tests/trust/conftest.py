"""A well-formed checkpoint, and how a stranger seals one after a change: the sums in it are his own."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import layout, reshard, store
from megatron.config.schema import ModelConfig
from megatron.model.gpt import Gpt

SHAPE = ModelConfig(d_model=16, n_heads=2, n_layers=1, d_head=8, d_ff=32, n_tokens=50, vocab_rows=64)
Seal = Callable[[Path], None]


def seal(checkpoint: Path) -> None:
    """Write meta.json anew, with the sums of what the folder has now."""
    meta = json.loads((checkpoint / layout.META).read_text())
    meta.pop(layout.OWN_SUM)
    for path in checkpoint.iterdir():
        if path.name != layout.META:
            content = path.read_bytes()
            meta["files"][path.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    sealed = {**meta, layout.OWN_SUM: layout.sum_of(meta)}
    (checkpoint / layout.META).write_text(json.dumps(sealed, indent=1))


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A run's checkpoint in the full layout."""
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
    return store.save(tmp_path / "full", "step", parts, meta)


@pytest.fixture
def shards(full: Path, tmp_path: Path) -> Path:
    """The same in the sharded layout."""
    path = tmp_path / "shards" / full.name
    reshard.to_sharded(full, path)
    return path
