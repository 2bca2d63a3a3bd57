"""Hanging ranks: a collective ends after dist.timeout_s, and the rank is named with its step.

tests/ranks checks that the process groups of every layout have this time limit.
"""

import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from megatron.plan.run_dir import is_done
from tests.rank_processes import Rank
from tests.train.conftest import read_error, read_step, save_every
from tests.train.faults import delay_operation, print_timeouts

pytestmark = pytest.mark.ranks
TIMEOUT_S = 3
SLACK_S = 40  # for a busy machine: to compare the ranks, and for a Python process with torch to exit
LIMIT = f"dist.timeout_s={TIMEOUT_S}"
LONG = "lr_scheduler.total_iterations=100000"
PARALLEL = [
    "dist.tensor_parallel=2",
    "dist.pipeline_parallel=2",
    "dist.engine=deepspeed dist.sharding_stage=zero3",
]


def stop_rank(start, run: Path, *changes: str, victim: int) -> tuple[list[Rank], int]:
    """Return the ranks, of which `victim` was stopped, and the last reported step at that time."""
    ranks = start(run, *changes, LIMIT, LONG)
    ranks[0].wait_for(lambda: read_step(run) >= 5)
    time.sleep(0.6)  # a rank sends its step every 0.25 s
    ranks[victim].send_signal(signal.SIGSTOP)
    return ranks, read_step(run)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", *PARALLEL])
def test_a_rank_that_hangs_is_named_with_its_step(start, tmp_path, layout) -> None:
    if "deepspeed" in layout:
        pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")
    ranks, step = stop_rank(start, tmp_path / "run", *layout.split(), victim=1)
    ended = ranks[0].wait(TIMEOUT_S + SLACK_S)
    assert ended.status == 1
    last = read_error(ended)
    named = re.match(r"error: rank 1 hangs: no heartbeat since step (\d+) \((.+?)\); rank 0 is in step", last)
    assert named is not None, ended.error
    assert 0 < int(named[1]) <= step + 200, "the interval between two beats is at most two seconds"
    assert f"dist.timeout_s={TIMEOUT_S} s" in last
    ranks[1].send_signal(signal.SIGCONT)
    assert ranks[1].wait(SLACK_S).status == 1


@pytest.mark.slow
def test_rank_0_which_hosts_the_store_is_named_too(start, tmp_path) -> None:
    ranks, _ = stop_rank(start, tmp_path / "run", victim=0)
    ended = ranks[1].wait(TIMEOUT_S + SLACK_S)
    assert ended.status == 1 and "error: rank 0 does not answer" in ended.error, ended.error


@pytest.mark.slow
def test_groups_for_background_saves_have_the_limit(pretrain, tmp_path) -> None:
    changes = ["checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"]
    changes += [save_every(4), "dist.timeout_s=77"]
    done = pretrain(tmp_path, *changes, n_ranks=2, change=print_timeouts)
    last = [line for line in done.error.splitlines() if line.startswith("limits ")][-1]
    assert set(last.removeprefix("limits ").split()) == {"77.0"} and last.count("77.0") >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "seconds", "operation", "limit_s"),
    [(0, TIMEOUT_S + 1, "save", TIMEOUT_S), (1, 4, "first_step", 20), (1, 4, "data", 20)],
)
def test_slow_work_does_not_end_a_run(pretrain, tmp_path, rank, seconds, operation, limit_s) -> None:
    """A checkpoint may take longer than dist.timeout_s as long as its writer is alive."""
    change = partial(delay_operation, rank, seconds, operation)
    done = pretrain(tmp_path, f"dist.timeout_s={limit_s}", n_ranks=2, change=change)
    assert is_done(tmp_path) and "hangs" not in done.error


def test_the_others_end_soon_after_a_kill_and_name_the_rank(start, tmp_path) -> None:
    ranks = start(tmp_path / "run", LONG, LIMIT)
    ranks[0].wait_for(lambda: read_step(tmp_path / "run") >= 2)
    ranks[1].send_signal(signal.SIGKILL)
    ended = ranks[0].wait(SLACK_S)
    last = read_error(ended)
    assert ended.status == 1 and last.startswith("error: another rank is gone"), ended.error
    assert re.search(r"rank 1 sends no heartbeat since (step \d+|before the first)", last), last


@pytest.mark.slow
def test_a_slow_rank_is_named(start, tmp_path) -> None:
    ranks = start(tmp_path / "run", LIMIT, change=partial(delay_operation, 1, 600, "data"))
    ended = ranks[0].wait()
    expected = "error: rank 1 is behind, in step 1 (waiting for data); others in step 1 (training)"
    assert ended.status == 1 and read_error(ended).startswith(expected), ended.error
    assert "rank 1 is behind, in step 1 (waiting for data)" in ranks[1].error.read_text()
