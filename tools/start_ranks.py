"""Start a command once for each rank on this machine, and answer with the ranks' own exit status.

    python tools/start_ranks.py 2 tools/pretrain.py examples_scaling/training/small.yaml \\
        dataset.path_train=synthetic model.n_tokens=1000

When one rank fails, the others are ended and its status is the answer. torchrun --standalone sets the same
variables, and answers 1 where this answers 75.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.command import command, count, run


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__, may_stop=True)
    parser.add_argument("n_ranks", type=count, metavar="N", help="processes to start, 1 or more")
    parser.add_argument("script", metavar="SCRIPT", help="Python file that each of them runs")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its own words")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and pass the status on."""
    args = build_parser().parse_args(argv)
    # after the words: --help should not wait for torch
    from megatron.train.local_ranks import run_ranks

    return run_ranks([sys.executable, args.script, *args.words], args.n_ranks)


if __name__ == "__main__":
    run(main)
