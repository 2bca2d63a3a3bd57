"""Train masked diffusion from the command line of pretrain_diff_gpt.py of the data-constrained study.

    python tools/pretrain_diff_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 \\
        --seq-length 64 --position-embedding-type rope --swiglu --normalization RMSNorm \\
        --disable-bias-linear --micro-batch-size 4 --global-batch-size 8 --train-iters 20 --lr 1e-3 \\
        --mock-data --vocab-size 512

See tools/pretrain_gpt.py for what becomes of the arguments.
"""

import argparse
import runpy
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import run_main

SIBLING = runpy.run_path(str(Path(__file__).with_name("pretrain_gpt.py")))


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser: argparse.ArgumentParser = SIBLING["build_parser"](__doc__)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Translate the command, and replace this process by tools/pretrain.py."""
    return int(SIBLING["main"](argv, "masked_diffusion", __doc__))


if __name__ == "__main__":
    run_main(main)
