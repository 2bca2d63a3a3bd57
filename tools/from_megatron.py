"""Translate a Megatron command line or launch script to a configuration.

    python tools/from_megatron.py --out run.yaml -- pretrain_gpt.py --num-layers 12 --hidden-size 768 \\
        --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --lr 6e-4 \\
        --micro-batch-size 8 --global-batch-size 64 --train-iters 1000 --split 100 \\
        --data-path data/c4_text_document --bf16

    python tools/from_megatron.py --script train.sh --set NODES=2 --out run.yaml

A table lists what becomes of each argument. Scripts are read, not run. The arguments of Megatron-LM,
Megatron-DeepSpeed and the data-constrained study are known: see examples_scaling/MIGRATE.md.
tools/pretrain_gpt.py and tools/pretrain_diff_gpt.py translate and train at once.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, positive_int, report_error, run_main
from megatron.config.migration.launch_script import read_launch_script
from megatron.config.migration.megatron_command import translate_command
from megatron.config.migration.write_translation import format_rows, write_translation

OBJECTIVES = {"ar": "autoregressive", "mdm": "masked_diffusion"}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "command",
        nargs="*",
        default=[],
        metavar="ARGS",
        help="after --: the command, with or without its launcher",
    )
    parser.add_argument("--script", type=Path, metavar="FILE", help="bash script that contains the command")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a variable of the script; a positional argument is a number, as in 1=checkpoints",
    )
    parser.add_argument(
        "--objective", choices=OBJECTIVES, help="default: mdm for pretrain_diff_gpt.py, ar for other scripts"
    )
    parser.add_argument(
        "--ranks", type=positive_int, metavar="N", help="number of ranks, if no launcher gives it"
    )
    parser.add_argument(
        "--out", type=Path, metavar="RUN.yaml", help="write the configuration; default: print it"
    )
    parser.add_argument(
        "--omit-unsupported",
        action="store_true",
        help="write the configuration without the arguments that are not supported; it is then another run",
    )
    return parser


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (words of this command, words after the first --), which are Megatron's."""
    words = list(argv)
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


def parse_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables of --set NAME=VALUE. Raises ValueError for another form."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--set: got {word!r}, expected NAME=VALUE")
        variables[name] = value
    return variables


def main(argv: Sequence[str] | None = None) -> int:
    """Translate the command, print the table, and write the configuration."""
    words, command = split_words(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    args = parser.parse_args(words)
    if bool(command) == (args.script is not None):
        parser.error("give either a command after -- or --script")
    written: dict[str, str] = {}
    try:
        if args.script is not None:
            command, written = read_launch_script(args.script, parse_variables(args.set))
        objective = None if args.objective is None else OBJECTIVES[args.objective]
        translation = translate_command(command, objective, args.ranks, written)
        print(format_rows(translation.rows))
        for line in translation.commands:
            print(f"first: {line}")
        if translation.refused and not args.omit_unsupported:
            others = _count_others(len(translation.refused) - 1)
            raise ValueError(
                f"{translation.refused[0].argument}: not supported{others}. "
                "Change the command as the table says, or add --omit-unsupported."
            )
        if args.out is None:
            print(write_translation(translation, None))
        else:
            write_translation(translation, args.out)
            print(f"{args.out}: configuration; train with python tools/pretrain.py {args.out}")
    except (OSError, ValueError) as error:
        return report_error(error)
    return 0


def _count_others(n: int) -> str:
    return f", nor {n} other{'s' if n > 1 else ''}" if n else ""


if __name__ == "__main__":
    run_main(main)
