"""Scalars for TensorBoard and Weights & Biases."""

import hashlib
from pathlib import Path
from typing import Any

from megatron.config.read import config_to_dict
from megatron.config.schema import RunConfig
from megatron.plan.run_dir import TENSORBOARD
from megatron.plan.run_plan import RunPlan

NOT_PLOTTED = ("elapsed_s",)


class Scalars:
    """Writes the numbers of each line of metrics.jsonl as <kind>/<name> over steps."""

    def __init__(self, config: RunConfig, plan: RunPlan, run: Path, first_step: int) -> None:
        """Open the enabled writers.

        first_step   later steps of an earlier attempt are purged from TensorBoard

        Raises ValueError if wandb or tensorboard is enabled but not installed.
        """
        self.wandb = None if config.logging.wandb is None else _init_wandb(config, plan, run)
        self.tensorboard = None
        if config.logging.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter  # imported on demand: slow
            except ImportError as error:
                raise ValueError(
                    f"logging.tensorboard: {error}. pip install tensorboard, or set "
                    "logging.tensorboard=false."
                ) from error
            self.tensorboard = SummaryWriter(str(run / TENSORBOARD), purge_step=first_step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """Write the floats of one line."""
        step = line["step"]
        values = {
            f"{line['kind']}/{name}": value
            for name, value in line.items()
            if isinstance(value, float) and name not in NOT_PLOTTED
        }
        if self.tensorboard is not None:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log({"step": step, **values})

    def close(self) -> None:
        """Flush and close the writers."""
        if self.tensorboard is not None:
            self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()


def _init_wandb(config: RunConfig, plan: RunPlan, run: Path) -> Any:
    """Open the Weights & Biases run; resuming continues the same one. WANDB_MODE=offline needs no network."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"logging.wandb: {error}. pip install wandb, or omit the key.") from error
    # the same id for the same plan in the same folder,
    # so that a resumed run appends to its W&B run
    key = f"{plan.identity} {run.resolve()}"
    try:
        wandb_run = wandb.init(
            project=config.logging.wandb,
            name=config.name,
            id=hashlib.sha256(key.encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run),
            config={"run": config_to_dict(config), "plan": plan.as_dict()},
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise ValueError(
            f"logging.wandb: {' '.join(str(error).split())}. Run `wandb login`, or set WANDB_MODE=offline."
        ) from error
    # a resumed run logs some steps again: the step is a
    # separate metric, since W&B's own may not decrease
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run
