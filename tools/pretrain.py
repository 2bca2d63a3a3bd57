"""Train one model from tokens on disk, and score its last checkpoint.

    python tools/pretrain.py examples_scaling/training/small.yaml optim.lr=1e-3 \\
        dataset.path_train=synthetic model.n_tokens=1000
    torchrun --standalone --nproc-per-node 2 tools/pretrain.py examples_scaling/training/small.yaml \\
        dataset.path_train=synthetic model.n_tokens=1000

examples_scaling/training/CONFIG.md lists every key with its type, default and unit.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import megatron.cli  # noqa: F401  # before slow imports, so that a signal during them is handled
from megatron.cli import STOPPED, create_parser, report_error
from megatron.config.schema import RunConfig
from megatron.config.yaml_file import read_yaml
from megatron.parallel.rank_env import exit_process, ranks_from_environment
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
        from megatron.train.loop import train_run

        return 0 if train_run(config, plan) else STOPPED
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


if __name__ == "__main__":
    exit_process(main())
