"""Branch from a step of another run.

One trunk with a constant learning rate serves runs of several lengths.
"""

from pathlib import Path
from typing import Any

from megatron.optim.schedule import LearningRateSchedule
from megatron.train.build import Run, build_schedule


def check_branch(path: Path, parts: dict[str, Any], meta: dict[str, Any], run: Run) -> None:
    """Check that this run, started at the trunk's step, gives the result of a run from its first step.

    The condition: every setting that affects the numbers is equal except for the schedule, and the schedules
    agree on all steps taken so far. Raises ValueError with the first step at which they differ.
    """
    if meta.get("trunk_identity") != run.plan.trunk_identity:
        raise ValueError(
            f"checkpoint.branch_from: {path} is from a run with another model, corpus, order, objective, "
            "batch, optimizer or seed. A branch may change lr_scheduler and evaluation only."
        )
    step = int(parts["iter"]["step"])
    schedule = build_schedule(run.config, run.plan)
    trunk_settings = {key: value for key, value in parts["lr"].items() if key != "step"}
    # exact equality of floats: equal settings evaluate the same expression and give equal bits
    difference = schedule.first_difference(LearningRateSchedule(**trunk_settings), step)
    if step >= run.plan.n_steps or difference is not None:
        last = min(step, run.plan.n_steps) if difference is None else difference
        raise ValueError(
            f"checkpoint.branch_from: {path} has {step:,} steps, but its learning rates equal those of this "
            f"run for the first {last:,} only. Branch from an earlier checkpoint, or start the decay later."
        )
