"""The commands pretrain_gpt.py and pretrain_diff_gpt.py: translate Megatron's command line, then train."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.cli import ToolParser, create_parser, report_error
from megatron.config.migration.command_line import parse_command, suggest_argument
from megatron.config.migration.megatron_command import translate_command
from megatron.config.migration.translate import Translation
from megatron.config.migration.write_translation import format_rows, write_translation
from megatron.parallel.rank_env import ranks_from_environment

CONFIGURATION = "from_megatron.yaml"


class MegatronParser(ToolParser):
    """Parser that takes Megatron's arguments as they are: its own only option is --help."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Return (Namespace with the words, no remaining words); exit with status 2 for unknown arguments."""
        words = self._strip_local_rank(list(sys.argv[1:] if args is None else args))
        if "-h" in words or "--help" in words:
            return super().parse_known_args(["--help"], namespace)
        self.arguments = []
        try:
            command = parse_command(words)
        except ValueError as error:
            self.error(str(error))
        for name in command.unknown:
            hint = suggest_argument(name)
            self.error(f"unrecognized argument: --{name}{'; ' + hint if hint else ''}")
        return argparse.Namespace(arguments=words, overrides=command.overrides), []


def build_megatron_parser(doc: str | None) -> argparse.ArgumentParser:
    """Build the parser of a command that takes Megatron's arguments."""
    parser = create_parser(doc or "", may_stop=True, takes_ranks=True, parser_class=MegatronParser)
    parser.add_argument(
        "arguments",
        nargs="*",
        default=[],
        metavar="ARGS",
        help="arguments of Megatron, section.key=value words",
    )
    return parser


def start_training(words: Sequence[str], overrides: Sequence[str], objective: str, tool: str) -> int:
    """Write the configuration of a command, and replace this process by tools/pretrain.py, which trains it.

    tool   the file of the command, in the folder of pretrain.py
    """
    try:
        ranks = ranks_from_environment(os.environ)
        translation = translate_command(words, objective, ranks.n_ranks)
        if ranks.rank == 0:
            print(format_rows(translation.rows), flush=True)
        check_translation(translation)
        path = Path(translation.settings["logging"]["run_dir"]) / CONFIGURATION
        path.parent.mkdir(parents=True, exist_ok=True)
        # every rank writes the same content, as its node may have a disk of its own
        write_translation(translation, path, ranks.rank)
    except (OSError, ValueError) as error:
        return report_error(error)
    trainer = Path(tool).with_name("pretrain.py")
    # the same process, so that signals and environment of the launcher reach the training
    os.execv(sys.executable, [sys.executable, str(trainer), str(path), *overrides])


def check_translation(translation: Translation) -> None:
    """Raise ValueError if arguments are not supported or datasets of --split are missing."""
    if translation.refused:
        row = translation.refused[0]
        raise ValueError(f"{row.argument}: not supported. {row.text[0].upper()}{row.text[1:]}.")
    data = translation.settings["dataset"]
    for line in translation.commands:
        prefixes = [data.get(key) for key in ("path_train", "path_eval")]
        prefix = line.rpartition(" ")[2]
        is_missing = not Path(f"{prefix}_train.idx").is_file()
        if is_missing and any(prefixes):
            raise ValueError(f"--split: the parts of the dataset are not there. Run: {line}")
