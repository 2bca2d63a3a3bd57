"""DeepSpeed is optional: runs with other engines work without it."""

import sys
from pathlib import Path

import pytest

from megatron.plan.run_dir import is_done
from tests.tool_modules import Cli


def test_without_deepspeed_its_engine_is_refused_and_torch_trains(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (tmp_path / "run.yaml").write_text(
        "dist: {cpu_only: true, dtype: float32}\n"
        "dataset: {path_train: synthetic, seq_len: 16, batch_size: 2}\n"
        "model: {d_model: 16, n_heads: 2, n_layers: 1, n_tokens: 50}\n"
        "lr_scheduler: {total_iterations: 1}\n"
        f"logging: {{run_dir: {tmp_path / 'run'}, tensorboard: false}}\n"
    )
    refused = cli("train", tmp_path / "run.yaml", "dist.engine=deepspeed", status=1).error
    assert refused.count("\n") == 1
    assert "deepspeed cannot be imported" in refused and "pip install deepspeed" in refused
    cli("train", tmp_path / "run.yaml")
    assert is_done(tmp_path / "run")
