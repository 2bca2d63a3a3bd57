"""Train an autoregressive model from the command line of Megatron's pretrain_gpt.py.

    python tools/pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 \\
        --seq-length 64 --position-embedding-type rope --swiglu --normalization RMSNorm \\
        --disable-bias-linear --micro-batch-size 4 --global-batch-size 8 --train-iters 20 --lr 1e-3 \\
        --mock-data --vocab-size 512

The arguments are translated as by tools/from_megatron.py to RUN_DIR/from_megatron.yaml, and tools/pretrain.py
trains it. section.key=value words change single keys. An argument that is not supported ends the command.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.cli import ToolParser, create_parser, run_main
from megatron.config.megatron_args import PAGE, Translation, find_argument, parse_arguments
from megatron.config.megatron_rules import split_overrides, translate_command, write_translation
from megatron.parallel.rank_env import ranks_from_environment


class MegatronParser(ToolParser):
    """Parser that takes Megatron's arguments as they are: its own only option is --help."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Return (Namespace with the words, no remaining words); exit with status 2 for unknown arguments."""
        words = self._strip_local_rank(list(sys.argv[1:] if args is None else args))
        if "-h" in words or "--help" in words:
            return super().parse_known_args(["--help"], namespace)
        self.arguments = []
        try:
            given = parse_arguments(split_overrides(words)[1])
        except ValueError as error:
            self.error(str(error))
        for name in given:
            if find_argument(name) is None:
                self.error(f"--{name}: not supported, see {PAGE}")
        return argparse.Namespace(arguments=words), []


def build_parser(doc: str | None = __doc__) -> argparse.ArgumentParser:
    """Build the parser of a command that takes Megatron's arguments."""
    parser = create_parser(doc or "", may_stop=True, takes_ranks=True, parser_class=MegatronParser)
    help = "arguments of Megatron, section.key=value words"
    parser.add_argument("arguments", nargs="*", default=[], metavar="ARGS", help=help)
    return parser


def main(
    argv: Sequence[str] | None = None, objective: str = "autoregressive", doc: str | None = __doc__
) -> int:
    """Write the configuration of a command, and replace this process by tools/pretrain.py."""
    args = build_parser(doc).parse_args(argv)
    ranks = ranks_from_environment(os.environ)
    overrides, words = split_overrides(args.arguments)
    translation = translate_command(words, objective)
    for note in translation.notes if ranks.rank == 0 else ():
        print(note, flush=True)
    check_translation(translation)
    path = Path(translation.settings["logging"]["run_dir"]) / "from_megatron.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    # every rank writes the same content, as its node may have a disk of its own
    write_translation(translation, path, ranks.rank)
    trainer = Path(__file__).with_name("pretrain.py")
    # the same process, so that signals and environment of the launcher reach the training
    os.execv(sys.executable, [sys.executable, str(trainer), str(path), *overrides])


def check_translation(translation: Translation) -> None:
    """Raise ValueError if arguments are not supported or datasets of --split are missing."""
    if translation.refused:
        raise ValueError(f"{translation.explain_refusal()}. Change the command.")
    for line in translation.commands:
        if not Path(f"{line.rpartition(' ')[2]}_train.idx").is_file():
            raise ValueError(f"--split: the parts of the dataset are not there. Run: {line}")


if __name__ == "__main__":
    run_main(main)
