"""DeepSpeed is optional: runs with other engines work without it."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from megatron.data.indexed_writer import IndexedWriter
from megatron.plan.run_dir import is_done

HIDE = "import sys; sys.modules['deepspeed'] = None; import runpy; sys.argv = sys.argv[1:]; "
HIDE += "runpy.run_path(sys.argv[0], run_name='__main__')"


def test_without_deepspeed_its_engine_is_refused_and_torch_trains(root: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "dist: {cpu_only: true, dtype: float32}\n"
        f"dataset: {{path_train: {tmp_path / 'text'}, seq_len: 16, batch_size: 2}}\n"
        "model: {d_model: 16, n_heads: 2, n_layers: 1}\n"
        "lr_scheduler: {total_iterations: 1}\n"
        f"logging: {{run_dir: {tmp_path / 'run'}, tensorboard: false}}\n"
    )
    command = [sys.executable, "-c", HIDE, str(root / "tools" / "pretrain.py"), str(tmp_path / "run.yaml")]
    write_corpus(tmp_path / "text")
    refused = subprocess.run([*command, "dist.engine=deepspeed"], capture_output=True, text=True, timeout=240)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "deepspeed cannot be imported" in refused.stderr
    assert "pip install deepspeed" in refused.stderr
    trained = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert trained.returncode == 0, trained.stderr
    assert is_done(tmp_path / "run")


def write_corpus(prefix: Path) -> None:
    with IndexedWriter(prefix, np.dtype(np.uint16), {"tokenizer": {"n_tokens": 50}}) as writer:
        writer.add_document(np.arange(1000) % 50)
