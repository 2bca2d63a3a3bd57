"""Hanging ranks: every process group has dist.timeout_s, and the rank is named with its step."""

import ast
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron.plan.run_dir import is_done
from megatron.study.launchers.launch import read_last_metrics

TIMEOUT_S = 5
SLACK_S = 40  # for a busy machine: to compare the ranks, and for a Python process with torch to exit
LAYOUTS = {
    "ddp": [],
    "tensor": ["dist.tensor_parallel=2"],
}
SLOW_LAYOUTS = {
    "zero3": ["dist.sharding_stage=zero3"],
    "pipeline": ["dist.pipeline_parallel=2"],
    "context": ["dist.context_parallel=2"],
    "deepspeed zero0": ["dist.engine=deepspeed"],
    "deepspeed zero3": ["dist.engine=deepspeed", "dist.sharding_stage=zero3"],
}
SCRIPT = Path(__file__).with_name("pretrain_with_slow_rank.py")


def read_step(run: Path) -> int:
    return (read_last_metrics(run) or {"step": 0})["step"]


def stop_rank(
    start, words: list[str], run: Path, victim: int
) -> tuple[list[subprocess.Popen[str]], float, int]:
    """Return (ranks, time at which one of them was stopped, last reported step at that time)."""
    words = [*words, f"logging.run_dir={run}", f"dist.timeout_s={TIMEOUT_S}"]
    ranks = start([*words, "lr_scheduler.total_iterations=100000"], n_ranks=2)
    deadline = time.monotonic() + 240
    while read_step(run) < 5:
        assert time.monotonic() < deadline, "no step"
        assert ranks[0].poll() is None, ranks[0].communicate()
        time.sleep(0.02)
    time.sleep(3)  # a rank reports its step once a second
    ranks[victim].send_signal(signal.SIGSTOP)
    return ranks, time.monotonic(), read_step(run)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)]
)
def test_the_others_end_in_time_and_name_the_rank_that_hangs_and_its_step(
    start, words, tmp_path, layout
) -> None:
    if "deepspeed" in layout:
        pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")
    words = [*words, *(LAYOUTS | SLOW_LAYOUTS)[layout]]
    ranks, stopped, step = stop_rank(start, words, tmp_path / "run", victim=1)
    _, stderr = ranks[0].communicate(timeout=TIMEOUT_S + SLACK_S)
    took_s = time.monotonic() - stopped
    last = stderr.strip().splitlines()[-1]
    assert ranks[0].returncode == 1, stderr
    assert took_s < TIMEOUT_S + SLACK_S
    named = re.match(r"error: rank 1 hangs: no heartbeat since step (\d+) \((.+?)\); rank 0 is in step", last)
    assert named is not None, stderr
    assert 0 < int(named[1]) <= step + 200, "the interval between two beats is at most two seconds"
    assert f"dist.timeout_s={TIMEOUT_S} s" in last
    ranks[1].send_signal(signal.SIGCONT)
    _, woken = ranks[1].communicate(timeout=SLACK_S)
    assert ranks[1].returncode == 1, woken


@pytest.mark.slow
@pytest.mark.ranks
def test_rank_0_which_hosts_the_store_is_named_too(start, words, tmp_path) -> None:
    ranks, *_ = stop_rank(start, words, tmp_path / "run", victim=0)
    _, stderr = ranks[1].communicate(timeout=TIMEOUT_S + SLACK_S)
    assert ranks[1].returncode == 1
    assert "error: rank 0 does not answer" in stderr, stderr


def parse_limits(stderr: str) -> list[float]:
    """Return the timeouts of the last reported step."""
    lines = [line for line in stderr.splitlines() if line.startswith("limits ")]
    return ast.literal_eval(lines[-1].removeprefix("limits "))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "n_groups"),
    [
        ("ddp", 2),
        pytest.param("ddp, asynchronous", 2, marks=pytest.mark.slow),
        ("zero3", 3),
        pytest.param("tensor", 3, marks=pytest.mark.slow),
        pytest.param("pipeline", 2, marks=pytest.mark.slow),
        pytest.param("context", 2, marks=pytest.mark.slow),
        pytest.param("deepspeed zero0", 2, marks=pytest.mark.slow),
        pytest.param("deepspeed zero3", 2, marks=pytest.mark.slow),
    ],
)
def test_every_process_group_has_the_time_limit(pretrain, words, tmp_path, layout, n_groups) -> None:
    words = [*words, f"logging.run_dir={tmp_path / 'run'}", "dist.timeout_s=77"]
    words += (LAYOUTS | SLOW_LAYOUTS).get(layout, [])
    if "deepspeed" in layout:
        pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")
    if "asynchronous" in layout:
        words += ["checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"]
        words += ["checkpoint.chkpt_saving_iterations=4"]
    done = pretrain(words, n_ranks=2, script=SCRIPT)
    assert done.returncode == 0, done.stderr
    limits = parse_limits(done.stderr)
    assert len(limits) >= n_groups
    assert set(limits) == {77.0}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("slow", "words_of"),
    [
        ("1:4:first_step", []),
        pytest.param("1:4:data", [], marks=pytest.mark.slow),
        pytest.param("0:4:save", [], marks=pytest.mark.slow),
        pytest.param("0:14:save", [f"dist.timeout_s={TIMEOUT_S}"], marks=pytest.mark.slow),
    ],
)
def test_slow_work_does_not_end_a_run(pretrain, words, tmp_path, monkeypatch, slow, words_of) -> None:
    """The last case: a checkpoint may take longer than dist.timeout_s as long as its writer is alive."""
    monkeypatch.setenv("SLOW", slow)
    run = tmp_path / "run"
    done = pretrain(
        [*words, f"logging.run_dir={run}", "dist.timeout_s=20", *words_of], n_ranks=2, script=SCRIPT
    )
    assert done.returncode == 0, done.stderr
    assert is_done(run)
    assert "hangs" not in done.stderr


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_ends_with_an_error_of_its_own_is_named(start, words, tmp_path) -> None:
    run = tmp_path / "run"
    ranks = start([*words, f"logging.run_dir={run}", "lr_scheduler.total_iterations=100000"], n_ranks=2)
    deadline = time.monotonic() + 240
    while read_step(run) < 2:
        assert time.monotonic() < deadline and ranks[0].poll() is None
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGKILL)
    _, stderr = ranks[0].communicate(timeout=SLACK_S)
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("error: another rank is gone"), stderr
    assert re.search(r"rank 1 sends no heartbeat since (step \d+|before the first)", last), last


@pytest.mark.slow
@pytest.mark.ranks
def test_a_live_rank_that_keeps_the_others_waiting_is_named(start, words, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SLOW", "1:600:data")
    run = tmp_path / "run"
    ranks = start([*words, f"logging.run_dir={run}", f"dist.timeout_s={TIMEOUT_S}"], n_ranks=2, script=SCRIPT)
    _, stderr = ranks[0].communicate(timeout=240)
    assert ranks[0].returncode == 1
    last = stderr.strip().splitlines()[-1]
    expected = "error: rank 1 is behind, in step 1 (waiting for data); others in step 1 (training)"
    assert last.startswith(expected), stderr
    ranks[1].kill()
    _, shown = ranks[1].communicate()
    assert "rank 1 is behind, in step 1 (waiting for data)" in shown
