"""Train one model from tokens on disk, and score its last checkpoint.

    python tools/pretrain.py examples_scaling/training/small.yaml optim.lr=1e-3 \\
        dataset.path_train=synthetic model.n_tokens=1000
    torchrun --standalone --nproc-per-node 2 tools/pretrain.py examples_scaling/training/small.yaml \\
        dataset.path_train=synthetic model.n_tokens=1000

examples_scaling/training/CONFIG.md lists every key with its type, default and unit.
"""

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import megatron.cli  # noqa: F401  # before slow imports, so that a signal during them is handled
from megatron.cli import STOPPED, create_parser, report_error
from megatron.config.schema import RunConfig
from megatron.config.yaml_file import read_yaml
from megatron.parallel.rank_env import ranks_from_environment
from megatron.plan.resolve import load_config
from megatron.plan.run_dir import is_done
from megatron.plan.run_plan import RunPlan, plan_run

AFTER_FIRST_S = 5.0  # delay before other ranks than the first of a host report an error


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True, takes_ranks=True)
    add = parser.add_argument
    add("config", metavar="CONFIG.yaml", help="configuration of the run")
    changes = "changes to the configuration, applied in order"
    add("overrides", nargs="*", default=[], metavar="section.key=value", help=changes)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train the run, and print its folder."""
    args = build_parser().parse_args(argv)
    local_rank = 0
    try:
        ranks = ranks_from_environment(os.environ)
        local_rank = ranks.local_rank
        config, plan = load_plan(args.config, args.overrides)
        # The identity is a hash of the settings that change the result. A finished run of other settings in
        # this folder is not this run.
        if is_done(Path(config.logging.run_dir), plan.identity):
            if ranks.rank == 0:
                print(f"{config.logging.run_dir}: already done")
            return 0
        return train_run(config, plan)
    except (OSError, ValueError, FloatingPointError) as error:
        if local_rank:  # the first rank of a host reports the error; then its launcher ends the others
            time.sleep(AFTER_FIRST_S)
        return report_error(error)


def load_plan(path: str, overrides: Sequence[str]) -> tuple[RunConfig, RunPlan]:
    """Read the configuration and derive the plan.

    This does not import torch, so a misspelt key fails at once.
    """
    from megatron.mixture.prepare import prepare_mixture

    data = read_yaml(path, overrides).get("dataset")
    mixture = data.get("mixture") if isinstance(data, dict) else None  # `load_config` rejects other types
    if mixture is not None:
        prepare_mixture(mixture)
    config = load_config(path, overrides)
    return config, plan_run(config)


def train_run(config: RunConfig, plan: RunPlan) -> int:
    """Train the run and return the exit status."""
    from megatron.checkpoint.preempt import watch_for_stop
    from megatron.parallel.world import open_world
    from megatron.train.build import build_run
    from megatron.train.loop import train
    from megatron.train.microbatch import list_microbatches

    with open_world(config.dist, config.misc.n_threads) as world:
        list_microbatches(config, world)  # reports numbers that do not divide before anything is built
        run = build_run(config, plan, world)
        # a signal only sets `stop`; the loop saves a checkpoint after the current step and returns False
        with watch_for_stop(config.misc.stop_file, config.misc.max_hours) as stop:
            done = train(run, stop)
        if world.is_first and done:
            print(f"{run.folder}: done, {plan.train_tokens:,} tokens")
        return 0 if done else STOPPED


def exit_process(status: int) -> NoReturn:
    """End the process with a status.

    Signals are ignored from here on: the work is done, and the exit, which takes seconds, must keep this
    status. With DeepSpeed, skip the interpreter's shutdown: its threads sometimes abort there.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if "deepspeed" not in sys.modules:
        sys.exit(status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit flushes nothing, so the buffers were flushed above
    os._exit(status)


if __name__ == "__main__":
    exit_process(main())
