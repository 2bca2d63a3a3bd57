"""Faults of a cluster: killed ranks, full disks, damaged files, NaN losses."""

import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import layout, store
from megatron.plan.run_dir import is_done, read_metrics
from megatron.study.launchers.launch import read_last_metrics
from tests.conftest import load_newest
from tests.train.conftest import read_losses

MDM = "objective.name=masked_diffusion"
STEPS_LEFT = 40  # after the last kill: at least a second, since a busy machine may be late
PEER_GONE_S = 60  # a rank ends within this time after another was killed


def read_step(run: Path) -> int:
    return (read_last_metrics(run) or {"step": 0})["step"]


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob("*.partial"))


def kill_at(run: Path, ranks: list[subprocess.Popen[str]], step: int, in_save: bool, after_s: float) -> bool:
    """SIGKILL every rank once `step` is logged: during the next save, or `after_s` seconds later.

    Return whether the signal ended rank 0; it may have exited already after losing another rank.
    """
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and ranks[0].poll() is None:
        if read_step(run) >= step and (not in_save or is_saving(run)):
            time.sleep(0 if in_save else after_s)
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
            return [rank.wait(120) for rank in ranks][0] == -signal.SIGKILL
        time.sleep(0.0005)
    return False


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("n_kills", "layout_of"),
    [
        (2, "full"),
        pytest.param(20, "full", marks=pytest.mark.slow),
        pytest.param(6, "sharded", marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_any_moment_resumes_and_ends_bit_equal(
    start, pretrain, words, tmp_path, n_kills, layout_of
) -> None:
    words = [
        *words,
        MDM,
        f"lr_scheduler.total_iterations={6 * n_kills + STEPS_LEFT}",
        "checkpoint.chkpt_saving_iterations=2",
        f"checkpoint.state_dict_type={layout_of}",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert pretrain([*words, f"logging.run_dir={whole}"], n_ranks=2).returncode == 0
    rng = random.Random(0)
    slow = Path(__file__).with_name("pretrain_with_random_waits.py")
    for kill in range(n_kills):
        ranks = start([*words, f"logging.run_dir={killed}"], n_ranks=2, script=slow)
        at = rng.randint(6 * kill + 1, 6 * kill + 5)
        assert kill_at(killed, ranks, at, in_save=kill % 2 == 0, after_s=rng.uniform(0, 0.05)), kill
        assert not is_done(killed)
    ended = pretrain([*words, f"logging.run_dir={killed}"], n_ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert read_losses(killed) == read_losses(whole)
    first, second = (load_newest(run / "checkpoints", "step") for run in (whole, killed))
    assert first is not None and second is not None
    for name, tensor in first[1]["model"].items():
        assert torch.equal(tensor, second[1]["model"][name]), name
    assert not is_saving(killed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words_of_layout", [[], ["state_dict_type=sharded"], ["state_dict_type=sharded", "asynchronous=true"]]
)
def test_a_run_killed_after_a_checkpoint_appeared_has_its_held_out_loss(
    pretrain, words, tmp_path, words_of_layout
) -> None:
    words = [
        *words,
        "checkpoint.chkpt_saving_iterations=2",
        *(f"checkpoint.{word}" for word in words_of_layout),
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert pretrain([*words, f"logging.run_dir={whole}"]).returncode == 0
    script = Path(__file__).with_name("pretrain_killed_after_save.py")
    words += [f"logging.run_dir={killed}"]
    assert pretrain(words, script=script).returncode == -signal.SIGKILL
    assert layout.find_checkpoints(killed / "checkpoints")[-1].step == 6
    assert pretrain(words).returncode == 0
    scored = [
        [(line["step"], line["loss"]) for line in read_metrics(run) if line["kind"] == "validation"]
        for run in (whole, killed)
    ]
    assert [step for step, _ in scored[0]] == [2, 4, 6, 8, 10, 12]
    assert scored[1] == scored[0]


@pytest.mark.slow
@pytest.mark.ranks
def test_when_a_rank_is_killed_the_others_end_soon_with_an_error(start, words, tmp_path) -> None:
    run = tmp_path / "run"
    long = [*words, f"logging.run_dir={run}", "lr_scheduler.total_iterations=100000"]
    ranks = start(long, n_ranks=2)
    deadline = time.monotonic() + 240
    while read_step(run) < 2:
        assert time.monotonic() < deadline and ranks[0].poll() is None
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGKILL)
    _, stderr = ranks[0].communicate(timeout=PEER_GONE_S)
    assert ranks[0].returncode == 1
    assert stderr.strip().splitlines()[-1].startswith("error: another rank is gone"), stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_a_full_disk_ends_the_run_and_leaves_the_old_checkpoint(pretrain, words, tmp_path) -> None:
    run = tmp_path / "run"
    words = [*words, f"logging.run_dir={run}", "checkpoint.chkpt_saving_iterations=7"]
    assert pretrain(words, n_ranks=2).returncode == 0
    first, last = layout.find_checkpoints(run / "checkpoints")
    subprocess.run(["rm", "-r", last.path, run / "result.json"], check=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limits[1]))  # children: 32 KiB per file
    try:
        failed = pretrain(words, n_ranks=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failed.returncode == 1
    sentence = failed.stderr.strip().splitlines()[-1]
    assert sentence.startswith("error: ") and "checkpoint of step 12 not saved" in sentence
    assert [path.name for path in (run / "checkpoints").iterdir()] == [first.path.name]
    assert store.load_checkpoint(first.path)[1]["step"] == 7
    assert not is_done(run)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(pretrain, words, tmp_path) -> None:
    run = tmp_path / "run"
    words = [*words, f"logging.run_dir={run}", "checkpoint.chkpt_saving_iterations=5"]
    words += ["checkpoint.keep_last=3"]
    assert pretrain(words).returncode == 0
    _, flipped, truncated = (checkpoint.path for checkpoint in layout.find_checkpoints(run / "checkpoints"))
    weights = truncated / layout.FILES["model"]
    weights.write_bytes(weights.read_bytes()[:-100])
    content = bytearray((flipped / layout.FILES["optim"]).read_bytes())
    content[len(content) // 2] ^= 1
    (flipped / layout.FILES["optim"]).write_bytes(content)
    before = read_losses(run)
    (run / "result.json").unlink()
    again = pretrain(words)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("falling back to the previous checkpoint") == 2
    assert "resuming after step 5" in again.stderr
    assert read_losses(run) == before


@pytest.mark.ranks
@pytest.mark.parametrize(
    "engine",
    [
        ["dist.engine=torch"],
        pytest.param(["dist.engine=torch", "dist.sharding_stage=zero3"], marks=pytest.mark.slow),
        pytest.param(["dist.engine=deepspeed"], marks=pytest.mark.slow),
        pytest.param(["dist.engine=deepspeed", "dist.sharding_stage=zero2"], marks=pytest.mark.slow),
        pytest.param(["dist.engine=deepspeed", "dist.sharding_stage=zero3"], marks=pytest.mark.slow),
    ],
)
def test_a_nan_loss_ends_the_run_or_is_skipped(pretrain, words, tmp_path, engine) -> None:
    if "dist.engine=deepspeed" in engine:
        pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")
    script = Path(__file__).with_name("pretrain_with_bad_sample.py")
    words = [*words, *engine, MDM, "logging.every_iterations=3"]
    # batches of 24 samples, half on each rank: sample 110 is in the fifth batch, samples 96 to 119
    bad = {"kind": "nonfinite", "step": 5, "ranks": [{"rank": 1, "first_sample": 108, "last_sample": 119}]}
    stopped = pretrain([*words, f"logging.run_dir={tmp_path / 'stop'}"], n_ranks=2, script=script)
    assert stopped.returncode == 1
    last = stopped.stderr.strip().splitlines()[-1]
    assert last.startswith("error: step 5: the loss is NaN or Inf on rank 1 (samples 108 to 119)")
    assert [line for line in read_metrics(tmp_path / "stop") if line["kind"] == "nonfinite"] == [bad]
    assert not list((tmp_path / "stop").glob("checkpoints/*"))
    words += [f"logging.run_dir={tmp_path / 'skip'}", "misc.on_nonfinite=skip"]
    skipped = pretrain(words, n_ranks=2, script=script)
    assert skipped.returncode == 0, skipped.stderr
    assert [line for line in read_metrics(tmp_path / "skip") if line["kind"] == "nonfinite"] == [bad]
    assert len(read_losses(tmp_path / "skip")) == 4
    assert all(loss < 10 for loss in read_losses(tmp_path / "skip"))
