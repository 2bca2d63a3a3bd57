"""Converted checkpoints whose writer is killed, or that have two writers at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import layout, reshard, store
from tests.conftest import save_checkpoint

WRITER = """
import sys
from pathlib import Path
from megatron.io import atomic_folder
with atomic_folder(Path(sys.argv[1])) as partial:
    (partial / "deep").mkdir()
    (partial / "deep" / "half").write_text("half")
    print("started", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Save a full checkpoint and return its path."""
    parts = {name: {"step": 3, "tensor": torch.arange(1000)} for name in layout.FILES}
    parts["model"] = {"w": torch.arange(1000)}
    parts["optim"] = {"state": {"w": {"exp_avg": torch.ones(3)}}, "count": 3}
    return save_checkpoint(tmp_path / "run", "step", parts, {"identity": "abc", "step": 3})


def start_writer(root: Path, target: Path) -> "subprocess.Popen[str]":
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target)], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert writer.stdout is not None and writer.stdout.readline() == "started\n"
    return writer


def test_leftovers_of_a_killed_writer_are_replaced(root: Path, full: Path, tmp_path: Path) -> None:
    for name in ("sharded", "full"):
        with start_writer(root, tmp_path / name) as writer:
            writer.send_signal(signal.SIGKILL)
        assert (tmp_path / f"{name}.partial" / "deep" / "half").is_file()
    reshard.reshard_to_sharded(full, tmp_path / "sharded")
    reshard.reshard_to_full(tmp_path / "sharded", tmp_path / "full")
    assert torch.equal(store.load_checkpoint(tmp_path / "full")[0]["model"]["w"], torch.arange(1000))
    assert not list(tmp_path.glob("*.partial"))
    assert not (tmp_path / "sharded" / "deep").exists()


def test_the_folder_of_a_running_writer_is_not_touched(root: Path, full: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with start_writer(root, target) as writer:
        with pytest.raises(ValueError, match="target: got another process writing it"):
            reshard.reshard_to_sharded(full, target)
        assert (tmp_path / "target.partial" / "deep" / "half").read_text() == "half"
        writer.communicate("", timeout=60)
    assert writer.returncode == 0
    assert (target / "deep" / "half").is_file() and not (tmp_path / "target.partial").exists()
    with pytest.raises(FileExistsError, match="already exists"):
        reshard.reshard_to_sharded(full, target)
    assert (target / "deep" / "half").is_file()
