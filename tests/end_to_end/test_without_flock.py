"""Tests on a file system without flock: everything works, and a second process is still refused."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.io import OWNER
from megatron.plan.run_dir import LOCK, is_done, read_metrics
from megatron.study.launchers.launch import read_last_metrics

NO_FLOCK = """
import errno, fcntl, os
def refuse(*words):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
fcntl.flock = refuse
"""
SMALL = [
    "dist.cpu_only=true", "dist.dtype=float32", "model.d_model=16", "model.n_heads=2", "model.n_layers=1",
    "dataset.seq_len=16", "dataset.batch_size=4", "logging.every_iterations=1", "logging.tensorboard=false",
    "misc.n_threads=1", "model.n_tokens=100", "dataset.path_train=synthetic",
    "lr_scheduler.warmup_iterations=1",
]  # fmt: skip
STUDY = """
name: tiny
directory: {out}
run:
  dist: {{dtype: float32, cpu_only: true}}
  dataset: {{path_train: {out}/text_text_document, seq_len: 32, batch_size: 4}}
  logging: {{tensorboard: false, every_iterations: 1}}
  misc: {{n_threads: 1}}
sizes:
  tiny: {{d_model: 16, n_heads: 2, n_layers: 1}}
grids:
  - {{sizes: [tiny], train_tokens: [1280, 2560]}}
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment of processes in which flock is not supported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_FLOCK)
    path = f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def lock_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if OWNER in path.name]


def wait_for_step(run: Path, process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 120
    while not read_last_metrics(run):
        assert time.monotonic() < end and process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_a_run_is_trained_by_one_process_and_resumed_after_that_was_killed(
    root, tmp_path, environment
) -> None:
    run = tmp_path / "run"
    (tmp_path / "run.yaml").write_text("name: test\n")
    tool = [sys.executable, str(root / "tools" / "pretrain.py"), str(tmp_path / "run.yaml"), *SMALL]
    words = [*tool, f"logging.run_dir={run}", "lr_scheduler.total_iterations=100000"]
    first = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(run, first)
        second = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
        assert second.returncode == 1
        assert f"error: {run}: another process is training there" in second.stderr
    finally:
        first.kill()
        _, errors = first.communicate(timeout=60)
    assert errors.count("has no file locks (Function not implemented)") == 1
    assert [path.name for path in lock_files(run)] == [LOCK + OWNER]
    words = [*tool, f"logging.run_dir={run}", "lr_scheduler.total_iterations=6"]
    words += ["checkpoint.resume=never"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert is_done(run)
    assert not lock_files(run)


def test_text_is_tokenised_and_two_sweeps_share_a_study(root, tmp_path, environment) -> None:
    lines = [json.dumps({"text": f"document {i} of some words " * 20}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    words = [sys.executable, str(root / "tools" / "preprocess_data_many_cores.py"), "--input"]
    words += [str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "text"), "--append-eod"]
    words += [
        "--tokenizer-type",
        "HFTokenizer",
        "--tokenizer-model",
        make_tokenizer(tmp_path),
        "--workers",
        "2",
    ]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert not lock_files(tmp_path) and not list(tmp_path.glob(".text*"))
    (tmp_path / "study.in.yaml").write_text(STUDY.format(out=tmp_path))
    words = [sys.executable, str(root / "tools" / "sweep.py"), str(tmp_path / "study.in.yaml")]
    several = [
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=280) for process in several]
    assert [process.returncode for process in several] == [0, 0], outputs
    folders = [path.parent for path in tmp_path.glob("runs/*/plan.json")]
    assert len(folders) == 2
    for run in folders:
        assert is_done(run)
        steps = [line["step"] for line in read_metrics(run) if line["kind"] == "train"]
        assert steps == list(range(1, len(steps) + 1))
    assert not lock_files(tmp_path)


def make_tokenizer(folder: Path) -> str:
    """Write a byte-level tokenizer of 256 bytes and an end-of-document token; return its folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    return str(folder / "tokenizer")
