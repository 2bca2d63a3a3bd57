"""Reader of a Megatron command line: launcher, script, and arguments with their values."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from megatron.config.migration.argument import LIST, NO_EFFECT, UNSUPPORTED, Argument
from megatron.config.migration.megatron_table import SECTIONS
from megatron.config.migration.megatron_unused import FAMILIES, NO_EFFECTS, REFUSED

ARGUMENTS: dict[str, Argument] = {
    argument.name.replace("_", "-"): argument
    for group in (*SECTIONS.values(), NO_EFFECTS, REFUSED)
    for argument in group
}
DIFFUSION_SCRIPTS = ("pretrain_diff_gpt.py", "finetune_diff_gpt.py")
# an override such as optim.lr=1e-3, which a data path never looks like
OVERRIDE = re.compile(
    r"(dist|dataset|model|objective|optim|lr_scheduler|checkpoint|evaluation|logging|misc)\.\w+="
)
# launcher -> options that give the ranks of a node and the nodes
RANK_OPTIONS = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--nproc")
NODE_OPTIONS = ("--nnodes", "--num_nodes", "-N")


@dataclass(frozen=True)
class CommandLine:
    """A command line, split into its parts.

    given      argument's name -> its value, in the order of the words; the last of repeated ones counts
    unknown    arguments that no known Megatron has, with their values
    overrides  section.key=value words
    script     the .py file, or empty
    n_ranks    ranks that the launcher's options give; None: not given
    """

    given: dict[str, Any]
    unknown: dict[str, list[str]] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    script: str = ""
    n_ranks: int | None = None

    @property
    def trains_diffusion(self) -> bool:
        """True if the script is one that trains masked diffusion."""
        return self.script.rpartition("/")[2] in DIFFUSION_SCRIPTS


def find_argument(name: str) -> Argument | None:
    """Return the declaration of an argument, by its name without dashes at the start, or of its family."""
    name = name.replace("_", "-")
    exact = ARGUMENTS.get(name)
    if exact is not None:
        return exact
    for prefix, (is_harmless, note) in FAMILIES.items():
        if name.startswith(prefix):
            return Argument(name, NO_EFFECT if is_harmless else UNSUPPORTED, LIST, note=note)
    return None


def suggest_argument(name: str) -> str:
    """Return a hint with the nearest known argument, or an empty string."""
    nearest = get_close_matches(name.replace("_", "-"), ARGUMENTS, 1)
    return f"did you mean {ARGUMENTS[nearest[0]].option}?" if nearest else ""


def parse_command(words: Sequence[str]) -> CommandLine:
    """Split the words of a command, with or without launcher and script, into its parts.

    Raises ValueError for words that belong to no argument, and for values of a wrong number or type.
    """
    launcher, script, arguments = _split_at_script(list(words))
    groups, overrides = _group_words(arguments)
    given: dict[str, Any] = {}
    unknown: dict[str, list[str]] = {}
    for name, values in groups:
        argument = find_argument(name)
        if argument is None:
            unknown[name] = values
        else:
            given.pop(argument.name, None)  # a repeated argument moves to its last place
            given[argument.name] = argument.convert(values)
    return CommandLine(given, unknown, overrides, script, _count_ranks(launcher))


def _split_at_script(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Return (words of the launcher, script, words after it)."""
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        return [], "", words
    return words[:place], words[place], words[place + 1 :]


def _group_words(words: list[str]) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return (argument's name, its values) of each argument, and the overrides of the configuration."""
    groups: list[tuple[str, list[str]]] = []
    overrides = [word for word in words if OVERRIDE.match(word)]
    for word in words:
        if OVERRIDE.match(word):
            continue
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append((name, [value] if equals else []))
        elif not groups:
            raise ValueError(f"got {word!r} before the first argument, expected --name value ...")
        else:
            # a negative number such as -1 is a value; Megatron has no argument with a single dash
            groups[-1][1].append(word)
    return groups, overrides


def _count_ranks(launcher: list[str]) -> int | None:
    """Return ranks per node x nodes of a launcher's words, or None if it does not give both as numbers."""
    counts = {"ranks": None, "nodes": 1}
    pairs = [word.partition("=")[::2] if "=" in word else (word, "") for word in launcher]
    for i, (name, value) in enumerate(pairs):
        value = value or (launcher[i + 1] if i + 1 < len(launcher) else "")
        key = "ranks" if name in RANK_OPTIONS else "nodes" if name in NODE_OPTIONS else None
        if key is not None:
            counts[key] = int(value) if value.isdigit() else None
    ranks, nodes = counts["ranks"], counts["nodes"]
    return None if ranks is None or nodes is None else ranks * nodes
