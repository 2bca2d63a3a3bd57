"""Files of a run directory, its lock, and whether it is done.

config.yaml    the resolved configuration
plan.json      quantities derived from it (plan/run_plan.py)
metrics.jsonl  one line per log point and per evaluation
checkpoints/   <prefix>.<timestamp>/
tensorboard/   the same scalars; wandb/ too if enabled
profile/       trace and table of logging.profile_steps
downstream/    <checkpoint>/<method>/results.json, the scores of tools/evaluate_downstream.py
result.json    written last; its presence means that the run is done
exit.json      written by the launcher for a failed run: its exit status and its last output
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.io import LockedFile, acquire_lock, read_json

CONFIG, PLAN, METRICS, RESULT = "config.yaml", "plan.json", "metrics.jsonl", "result.json"
EXIT, LOCK = "exit.json", ".lock"
DOWNSTREAM, DOWNSTREAM_RESULTS = "downstream", "results.json"
CHECKPOINTS, TENSORBOARD, PROFILE = "checkpoints", "tensorboard", "profile"


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of metrics.jsonl. Raises ValueError for a damaged line.

    A last line without a line end is skipped: it is still being written.
    """
    path = run / METRICS
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            keys = record if isinstance(record, dict) else {}
            if not isinstance(keys.get("kind"), str) or not isinstance(keys.get("step"), int):
                raise ValueError(
                    f"{path}, line {number}: got {line[:40]!r}, expected a JSON object with kind and step. "
                    "Remove the line."
                )
            yield keys


def lock_run(run: Path, wait_s: float = 0.0) -> LockedFile | None:
    """Lock a run for this process until the returned lock is closed; None if another process trains it.

    The lock ends with the process in any case.
    `wait_s` as in `io.acquire_lock`.
    """
    # The lock is on a file of its own, since files of the run are replaced by
    # renames, and a lock belongs to an inode.
    run.mkdir(parents=True, exist_ok=True)
    return acquire_lock(run / LOCK, wait_s)


def is_done(run: Path, identity: str | None = None) -> bool:
    """Return whether the run is done and, if `identity` is given, has that identity."""
    result = read_json(run / RESULT)
    return result is not None and (identity is None or result.get("identity") == identity)
