"""Train one model, from tokens on disk to a scored checkpoint.

    python tools/pretrain.py examples_scaling/training/small.yaml optim.lr=1e-3 \\
        dataset.path_train=synthetic model.n_tokens=1000
    torchrun --standalone --nproc-per-node 2 tools/pretrain.py examples_scaling/training/small.yaml \\
        dataset.path_train=synthetic model.n_tokens=1000

Every key, with its type, default and unit: examples_scaling/training/CONFIG.md.
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

import megatron.early_stop  # noqa: F401  # before what takes long
from megatron.command import STOPPED, command, failed
from megatron.config.launcher import ranks_from_environment
from megatron.config.plan import RunPlan, plan_run
from megatron.config.read import read_config
from megatron.config.schema import RunConfig
from megatron.config.yaml_file import read_yaml
from megatron.processes import end_after_parent
from megatron.run_dir import is_done

AFTER_FIRST_S = 5.0  # what a rank waits before it repeats, or alone tells, what is wrong with the settings


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__, may_stop=True, takes_ranks=True)
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration of the run")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="changes to it, in order"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and say where the result is."""
    args = build_parser().parse_args(argv)
    end_after_parent()
    local_rank = 0
    try:
        ranks = ranks_from_environment(os.environ)
        local_rank = ranks.local_rank
        config, plan = planned(args.config, args.overrides)
    except (OSError, ValueError) as error:
        if local_rank:  # the first rank of a host tells first, and its launcher then ends the others
            time.sleep(AFTER_FIRST_S)
        return failed(error)
    try:
        if is_done(Path(config.logging.run_dir), plan.identity):
            if ranks.rank == 0:
                print(f"{config.logging.run_dir}: already done")
            return 0
        return trained(config, plan)
    except (OSError, ValueError, FloatingPointError) as error:
        return failed(error)


def planned(path: str, overrides: Sequence[str]) -> tuple[RunConfig, RunPlan]:
    """The run and what follows from it. Nothing here waits for torch: a misspelt word is told at once."""
    from megatron.mixture.spec import prepare

    data = read_yaml(path, overrides).get("dataset")
    mixture = data.get("mixture") if isinstance(data, dict) else None  # `read_config` refuses the rest
    if mixture is not None:
        prepare(mixture)
    config = read_config(path, overrides)
    return config, plan_run(config)


def trained(config: RunConfig, plan: RunPlan) -> int:
    """Train; the exit status."""
    from megatron.checkpoint.preempt import watch_for_stop
    from megatron.parallel.world import open_world
    from megatron.train.build import build, microbatch_rows
    from megatron.train.loop import train

    with open_world(config.dist, config.misc.n_threads) as world:
        microbatch_rows(config, world)
        run = build(config, plan, world)
        with watch_for_stop(config.misc.stop_file, config.misc.max_hours) as stop:
            done = train(run, stop)
        if world.is_first and done:
            print(f"{run.folder}: done, {plan.train_tokens:,} tokens")
        return 0 if done else STOPPED


def leave(status: int) -> NoReturn:
    """End the process. With DeepSpeed at once: its threads sometimes abort while the interpreter ends.

    Told to stop once more while it ends, which takes seconds, it keeps this status: the work is done.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if "deepspeed" not in sys.modules:
        sys.exit(status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
