"""Console script `scaling`: every file in tools/ as a sub-command, with equal arguments and exit statuses.

    scaling                        list the sub-commands; also --help and help
    scaling help train             the same as scaling train --help
    scaling --version              print the version
    scaling train CONFIG.yaml      the same as python tools/pretrain.py CONFIG.yaml
    torchrun --nproc-per-node 2 -m megatron.cli train CONFIG.yaml

A sub-command runs its file as the main module. The files are in tools/ of a checkout, and in
megatron/commands/ of an installed wheel, where setup.py copies them: a wheel has no package named tools.
"""

import shutil
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from megatron import command
from megatron.cli import escape_controls, is_terminal, open_console

PROGRAM = "scaling"
PACKAGE = Path(__file__).resolve().parent
INSTALLED = PACKAGE / "commands"
TOOLS = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent / "tools"
HEAD = f"""usage: {PROGRAM} SUB-COMMAND ...

Train models on a budget of text, and fit scaling laws to their losses."""
FOOT = f"""{PROGRAM} SUB-COMMAND --help lists its arguments and examples.
{command.STATUSES}, {command.STOPPED} stopped by a signal."""
GROUPS = {  # in the order of a study: sub-command -> file in tools/
    "setup": {
        "check": "check_environment",
        "completion": "completion",
        "reference": "config_reference",
        "migration": "migration_page",
        "code-points": "derive_code_points",
    },
    "prepare text": {
        "download": "download_assets",
        "corpus": "prepare_corpus",
        "tokenizer": "train_tokenizer",
        "prepare": "preprocess_data_many_cores",
        "inspect": "inspect_data",
        "merge": "merge_datasets",
        "subset": "subset_corpus",
        "register": "register_corpus",
        "mixture": "prepare_mixture",
        "serve": "mixture_server",
    },
    "plan": {"sizes": "model_sizes", "plan": "plan_study"},
    "train": {
        "train": "pretrain",
        "gpt": "pretrain_gpt",
        "diff-gpt": "pretrain_diff_gpt",
        "megatron": "from_megatron",
        "ranks": "start_ranks",
        "sweep": "sweep",
        "convert": "convert_checkpoint",
    },
    "score": {
        "validate": "validate",
        "evaluate": "evaluate_downstream",
        "generate": "generate_text",
        "compare": "compare_runs",
    },
    "fit": {
        "collect": "collect",
        "fit": "fit_law",
        "frontier": "fit_frontier",
        "downstream": "fit_downstream",
        "power-law": "fit_power_law",
        "predict": "predict",
        "crossover": "find_crossover",
    },
    "report": {"report": "make_report"},
}
SUBCOMMANDS = {name: tool for group in GROUPS.values() for name, tool in group.items()}


def find_tool(name: str) -> Path:
    """Return the file of a sub-command."""
    return TOOLS / f"{SUBCOMMANDS[name]}.py"


def read_summary(tool: Path) -> str:
    """Return the first line of a tool's docstring, a sentence, without importing the tool."""
    with tool.open(encoding="utf-8") as file:
        return file.readline().strip().removeprefix('"""')


def list_lines(width: int | None) -> list[str]:
    """Return the list of sub-commands with a line each, cut to a width. Headings are not indented."""
    indent = max(map(len, SUBCOMMANDS)) + 2
    lines = []
    for group, names in GROUPS.items():
        lines += ["", group]
        for name in names:
            line = f"  {name:<{indent}}{read_summary(find_tool(name))}"
            lines.append(line if width is None or len(line) <= width else f"{line[: width - 2]}..")
    return lines


def print_list() -> None:
    """Print the usage and the sub-commands, on a terminal with bold headings."""
    if not is_terminal(sys.stdout):
        print("\n".join([HEAD, *list_lines(None), "", FOOT]))
        return
    console = open_console(sys.stdout)
    console.print(HEAD, soft_wrap=True)
    for line in list_lines(shutil.get_terminal_size().columns):
        console.print(line, style=None if line.startswith(" ") else "bold", soft_wrap=True)
    console.print(f"\n{FOOT}", soft_wrap=True)


def print_version() -> int:
    """Print the version of the installed distribution, and return the exit status."""
    from importlib.metadata import PackageNotFoundError, version  # imported on demand: slow

    try:
        print(f"{command.DISTRIBUTION} {version(command.DISTRIBUTION)}")
    except PackageNotFoundError:
        raise ValueError(
            f"{command.DISTRIBUTION}: not installed. Run pip install -e . in the checkout."
        ) from None
    return 0


def report_unknown(word: str) -> int:
    """Print the nearest sub-command to an unknown one, and return the exit status of wrong usage."""
    # people who know the files in tools/ type their names
    names = {name: name for name in SUBCOMMANDS} | {tool: name for name, tool in SUBCOMMANDS.items()}
    nearest = get_close_matches(word.lower().removesuffix(".py"), names, 1)
    hint = f"; did you mean {names[nearest[0]]}?" if nearest else ""
    got = escape_controls(word)
    print(
        f"{PROGRAM}: error: got '{got}', expected a sub-command{hint} (see {PROGRAM} --help)", file=sys.stderr
    )
    return 2


def run_tool(name: str, words: Sequence[str]) -> None:
    """Run the file of a sub-command as the main module, as `python tools/x.py` does; it ends the process."""
    path = str(find_tool(name))
    sys.argv = [f"{PROGRAM} {name}", *words]  # argparse takes the program's name from it
    command.subcommand_names.update({tool: f"{PROGRAM} {name}" for name, tool in SUBCOMMANDS.items()})
    # early_stop.py and spawned workers look for the file of the main module
    main_module = ModuleType("__main__")
    main_module.__file__ = path
    sys.modules["__main__"] = main_module
    code = SourceFileLoader("__main__", path).get_code("__main__")
    assert code is not None
    exec(code, main_module.__dict__)


def main() -> int:
    """Run the sub-command that is named by the first argument, or list all."""
    words = sys.argv[1:]
    if words == ["--version"]:
        return print_version()
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print_list()
        return 0
    if words[0] not in SUBCOMMANDS:
        return report_unknown(words[0])
    run_tool(words[0], words[1:])
    return 0


def run_console() -> None:
    """Entry point of the console script."""
    command.run_main(main)


def run_mixture_server() -> None:
    """Entry point of the console script `mixtera-server`: `scaling serve` with its arguments."""
    sys.argv.insert(1, "serve")
    run_console()


if __name__ == "__main__":
    run_console()
