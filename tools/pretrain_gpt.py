"""Train an autoregressive model from the command line of Megatron's pretrain_gpt.py.

    python tools/pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 \\
        --seq-length 64 --position-embedding-type rope --swiglu --normalization RMSNorm \\
        --disable-bias-linear --micro-batch-size 4 --global-batch-size 8 --train-iters 20 --lr 1e-3 \\
        --mock-data --vocab-size 512

The arguments are translated as by tools/from_megatron.py to RUN_DIR/from_megatron.yaml, and tools/pretrain.py
trains it. section.key=value words change single keys. An argument that is not supported ends the command.
"""

import argparse
from collections.abc import Sequence

from megatron.cli import run_main
from megatron.config.migration.train_translated import build_megatron_parser, start_training


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    return build_megatron_parser(__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Translate the command, and replace this process by tools/pretrain.py."""
    args = build_parser().parse_args(argv)
    return start_training(args.arguments, args.overrides, "autoregressive", __file__)


if __name__ == "__main__":
    run_main(main)
