"""What every launcher does: give a run its folder, say how far it is, and what it said last."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from megatron.config.read import write_config
from megatron.run_dir import CHECKPOINTS, CONFIG, EXIT, PLAN, last_metrics, write_json
from megatron.scaling.ladder import PlannedRun

ROOT = Path(__file__).resolve().parents[2]
LOG = "log.txt"
STOP_WAIT_S = 60.0


@dataclass
class Job:
    """One run that was started. `handle` is the launcher's; `devices` are the local ones that it holds.

    elsewhere   another process has started it: this sweep waits for its result, and never stops it
    """

    run: PlannedRun
    handle: Any
    devices: list[int] = field(default_factory=list)
    elsewhere: bool = False

    def progress(self) -> dict[str, Any]:
        """The newest line of its metrics, empty where it has told nothing yet."""
        return last_metrics(self.run.folder) or {}

    def fraction(self) -> float:
        """How much of its own steps it has told of."""
        begin = self.run.plan.n_steps - self.run.own_steps
        step = self.progress().get("step", 0)
        return min(1.0, max(0.0, (step - begin) / self.run.own_steps))

    def last_words(self) -> str:
        """The last line it printed: the error, where there is one."""
        path = self.run.folder / LOG
        lines = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
        return lines[-1] if lines else "it printed nothing"


class Launcher(Protocol):
    """Starts runs somewhere. OSError where that place does not answer."""

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """Prepare and start those of `runs` that there is room for now, the first first.

        Those that another process has are given as jobs that are `elsewhere`.
        """
        ...

    def running(self, runs: Sequence[PlannedRun]) -> list[Job] | None:
        """Those of `runs` that another sweep has started and that go on; None while that is unknown."""
        ...

    def ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """The jobs that have ended, with their exit status; for one `elsewhere` that is 75 or 0."""
        ...

    def stop(self, jobs: Sequence[Job]) -> None:
        """Ask every job to save and stop, wait, and end those that do not."""
        ...

    def leave(self, jobs: Sequence[Job]) -> None:
        """After an error, or SIGHUP: end what cannot go on without the sweep, and leave the rest running."""
        ...

    def close(self) -> None:
        """Let other sweeps have what this one had."""
        ...


def prepare(run: PlannedRun) -> None:
    """Write what tools/pretrain.py reads: the configuration, branching from the trunk where it can."""
    run.folder.mkdir(parents=True, exist_ok=True)
    config = run.config
    trunk = None if run.branch is None else checkpoint_of(run.branch.trunk, run.branch.step)
    if trunk is not None:
        config = replace(config, checkpoint=replace(config.checkpoint, branch_from=str(trunk)))
    write_config(config, run.folder / CONFIG)
    write_json(run.folder / PLAN, run.plan.as_dict())
    (run.folder / EXIT).unlink(missing_ok=True)


def checkpoint_of(run_dir: Path, last_step: int, exactly: bool = False) -> Path | None:
    """The latest whole checkpoint of a run up to a step, or only that step's; preempted ones go away."""
    found: dict[tuple[int, int], Path] = {}
    for meta in (run_dir / CHECKPOINTS).glob("*/meta.json"):
        if meta.parent.suffix in (".preempt", ".partial"):
            continue
        try:
            told = json.loads(meta.read_text())
            # of two of one step the later generation's: the run was taken back behind the other
            found[int(told["step"]), int(told.get("generation", 0))] = meta.parent
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # somebody is deleting it, or it is damaged
    steps = [key for key in found if key[0] == last_step or key[0] < last_step and not exactly]
    return found[max(steps)] if steps else None
