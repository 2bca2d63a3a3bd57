"""Scalars for people to watch: TensorBoard and Weights & Biases."""

import hashlib
from pathlib import Path
from typing import Any

from megatron.config.plan import RunPlan
from megatron.config.read import as_dict
from megatron.config.schema import RunConfig
from megatron.run_dir import TENSORBOARD

NOT_PLOTTED = ("elapsed_s",)


class Scalars:
    """Passes the numbers of each line of metrics.jsonl on, as <kind>/<name> over steps."""

    def __init__(self, config: RunConfig, plan: RunPlan, run: Path, first_step: int) -> None:
        """`first_step`: what an earlier attempt told of later steps is forgotten.

        ValueError where wandb or tensorboard is asked for and not installed.
        """
        self.wandb = None if config.logging.wandb is None else _wandb_run(config, plan, run)
        self.tensorboard = None
        if config.logging.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter  # imports slowly, and not all ask for it
            except ImportError as error:
                raise ValueError(
                    f"logging.tensorboard: {error}; pip install tensorboard, or set logging.tensorboard=false"
                ) from error
            self.tensorboard = SummaryWriter(str(run / TENSORBOARD), purge_step=first_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Tell the floats of one line."""
        step = line["step"]
        told = {
            f"{line['kind']}/{name}": value
            for name, value in line.items()
            if isinstance(value, float) and name not in NOT_PLOTTED
        }
        if self.tensorboard is not None:
            for name, value in told.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log({"step": step, **told})

    def close(self) -> None:
        """Flush everything."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def _wandb_run(config: RunConfig, plan: RunPlan, run: Path) -> Any:
    """A run of Weights & Biases, the same one when this run goes on; WANDB_MODE=offline needs no network."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"logging.wandb: {error}; pip install wandb, or leave the key out") from error
    key = f"{plan.identity} {run.resolve()}"
    try:
        held = wandb.init(
            project=config.logging.wandb,
            name=config.name,
            id=hashlib.sha256(key.encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run),
            config={"run": as_dict(config), "plan": plan.as_dict()},
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise ValueError(
            f"logging.wandb: {' '.join(str(error).split())}; run `wandb login`, or set WANDB_MODE=offline"
        ) from error
    # a run that goes on tells some steps again: the step is a number of its own, which may go back
    held.define_metric("*", step_metric="step")
    return held
