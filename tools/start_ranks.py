"""Start a command once for each rank on this machine, and answer with the ranks' own exit status.

    python tools/start_ranks.py 2 tools/pretrain.py CONFIG.yaml [section.key=value ...]

0: all ended well; 75: they were stopped when asked, and the same command goes on; else that of a rank that
failed, after which the others are ended too. torchrun --standalone sets the same variables, and answers 1
where this answers 75.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron.train.local_ranks import run_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run, and pass the status on."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="example: python tools/start_ranks.py 2 tools/pretrain.py "
        "examples_scaling/training/small.yaml dataset.path_train=synthetic model.n_tokens=1000",
    )
    parser.add_argument("n_ranks", type=int, help="processes to start")
    parser.add_argument("script", help="Python file that each of them runs")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="its own words")
    args = parser.parse_args(argv)
    if args.n_ranks < 1:
        parser.error(f"n_ranks: {args.n_ranks}, wanted 1 or more")
    return run_ranks([sys.executable, args.script, *args.words], args.n_ranks)


if __name__ == "__main__":
    sys.exit(main())
