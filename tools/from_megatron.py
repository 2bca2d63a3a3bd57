"""Translate a Megatron command line or launch script to a configuration.

    python tools/from_megatron.py --out run.yaml -- pretrain_gpt.py --num-layers 12 --hidden-size 768 \\
        --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --lr 6e-4 \\
        --micro-batch-size 8 --global-batch-size 64 --train-iters 1000 --split 100 \\
        --data-path data/c4_text_document --bf16

    NODES=2 python tools/from_megatron.py --script train.sh --execute --out run.yaml

See examples_scaling/MIGRATE.md for the arguments. --script requires --execute, which runs the script in an
empty directory, with programs that record their arguments in place of torchrun, deepspeed, python, srun and
mpirun. Read the script first: all other commands in it run. Words after -- are the script's arguments.
tools/pretrain_gpt.py and tools/pretrain_diff_gpt.py translate and train at once.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, run_main
from megatron.config.megatron_rules import translate_command, write_translation
from megatron.config.megatron_script import LAUNCHERS, record_launch_script

REMOVED = {
    "--ranks": "Give --global-batch-size in the command",
    "--set": "Set variables in the environment, as in NAME=VALUE python tools/from_megatron.py, and give "
    "arguments of the script after --",
}
OBJECTIVES = {"ar": "autoregressive", "mdm": "masked_diffusion"}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, removed=REMOVED)
    add = parser.add_argument
    command = "after --: the command, with or without its launcher, or the arguments of the script"
    add("command", nargs="*", default=[], metavar="ARGS", help=command)
    add("--script", type=Path, metavar="FILE", help="bash script that starts the command")
    add("--execute", action="store_true", help="run the script, without its launchers")
    objective = "default: mdm for pretrain_diff_gpt.py, ar for other scripts"
    add("--objective", choices=OBJECTIVES, help=objective)
    add("--out", type=Path, metavar="RUN.yaml", help="write the configuration; default: print it")
    omit = "write it without the arguments that are not supported; it is then another run"
    add("--omit-unsupported", action="store_true", help=omit)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Translate the command, print what is special about it, and write the configuration."""
    words = list(sys.argv[1:] if argv is None else argv)
    # words after the first -- are Megatron's
    place = words.index("--") if "--" in words else len(words)
    words, command = words[:place], words[place + 1 :]
    parser = build_parser()
    args = parser.parse_args(words)
    if not command and args.script is None:
        parser.error("give either a command after -- or --script")
    if args.script is not None and not args.execute:
        parser.error(f"--script: {args.script} is translated by running it. Read it, then add --execute")
    texts: dict[str, str] = {}
    if args.script is not None:
        names = ", ".join(LAUNCHERS)
        print(f"{args.script.resolve()}: run by bash, with a recorder for {names}", flush=True)
        command, texts = record_launch_script(args.script, command)
        print(f"command: {shlex.join(command)}")
    objective = None if args.objective is None else OBJECTIVES[args.objective]
    translation = translate_command(command, objective, texts)
    for line in [*translation.notes, *(f"first: {line}" for line in translation.commands)]:
        print(line)
    if translation.refused and not args.omit_unsupported:
        reasons = translation.explain_refusal()
        raise ValueError(f"{reasons}. Change the command, or add --omit-unsupported.")
    if translation.refused:
        print(f"omitted: {translation.explain_refusal()}")
    text = write_translation(translation, args.out)
    done = f"{args.out}: configuration; train with python tools/pretrain.py {args.out}"
    print(text if args.out is None else done)
    return 0


if __name__ == "__main__":
    run_main(main)
