"""Extraction of the commands in the guides' code blocks, and checks of them without running them."""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import groupby, takewhile
from pathlib import Path
from types import ModuleType

from megatron.cli import ACTIONS, SUBCOMMANDS
from megatron.config.schema import RunConfig
from tests.tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples_scaling/**/*.md"))]
SHELL = ("sh", "bash", "console", "shell")
OPERATORS = ("|", "&&", "||", ";", "&")
# programs that guides use but that a test machine may lack
ELSEWHERE = (".", "cd", "docker", "enroot", "git", "hf", "make", "openssl", "sbatch", "sudo")
LAUNCHERS = ("torchrun", "srun", "mpirun", "mpiexec", "deepspeed", "docker", "podman", "enroot", "apptainer")
TOOL = re.compile(r"(?:^|.*/)(tools/(?:bench/)?\w+\.py)$")
OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")


@dataclass(frozen=True)
class Command:
    """One simple command: its `NAME=value` assignments, its words, and the output shown in the guide."""

    where: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    output: str | None = None


def split_shell(text: str) -> list[str]:
    """Split a line of shell without its comment into words and operators."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    return list(lexer)


def split_commands(
    lines: Sequence[str], where: str = "", first: int = 0, output: str | None = None
) -> Iterator[Command]:
    """Yield the simple commands of some lines of shell, which are continued after a backslash.

    Guides need no redirections, loops and here-documents, so these are refused.
    """
    text, start = "", 0
    for i, line in enumerate(lines):
        start = start if text else i
        text += line.strip()
        if text.endswith("\\"):
            text = text[:-1]
            continue
        words = split_shell(text)
        assert not {"<", ">", ">>", "<<"} & set(words), f"{where}: a redirection in: {text}"
        for is_operator, group in groupby(words, OPERATORS.__contains__):
            if not is_operator:
                simple = list(group)
                assigned = list(takewhile(OVERRIDE.match, simple))
                environment = dict(word.split("=", 1) for word in assigned)
                yield Command(f"{where}:{first + start}", simple[len(assigned) :], environment, output)
        text = ""
    assert not text, f"a command has no end: {text}"


def commands_of(guide: Path) -> list[Command]:
    """Return every command of a guide's shell blocks. In a block with `$ ` lines, the other lines are output.

    The output in a ```text block contains losses and times of a real run, and is not compared.
    """
    commands: list[Command] = []
    lines = guide.read_text().splitlines()
    kind, start = None, 0
    for i, line in enumerate([*lines, ""]):
        if line.startswith("```") and kind is None:
            kind, start = line[3:].strip().split(" ")[0], i + 1
        elif line.startswith("```"):
            if kind in SHELL:
                commands += _parse_block(lines[start:i], str(guide.relative_to(ROOT)), start + 1)
            elif kind == "text" and any(shown.startswith("$ ") for shown in lines[start:i]):
                begin = next(j for j in range(start, i) if lines[j].startswith("$ "))
                captured = _parse_block(lines[begin:i], str(guide.relative_to(ROOT)), begin + 1)
                commands += [replace(command, output=None) for command in captured]
            kind = None
    return commands


def _parse_block(lines: list[str], where: str, first: int) -> Iterator[Command]:
    if not any(line.startswith("$ ") for line in lines):
        yield from split_commands(lines, where, first)
        return
    i = 0
    while i < len(lines):
        start = i
        assert lines[i].startswith("$ "), f"{where}: output before the first command"
        typed, i = [lines[i][2:]], i + 1
        while typed[-1].endswith("\\"):
            typed.append(lines[i])
            i += 1
        shown = []
        while i < len(lines) and not lines[i].startswith("$ "):
            shown.append(lines[i] + "\n")
            i += 1
        yield from split_commands(typed, where, first + start, "".join(shown))


def inline_commands(guide: Path) -> list[tuple[str, list[str]]]:
    """Return (tool, options) of `tools/x.py --option ...` and `scaling x --option ...` in a guide's prose."""
    prose = re.sub(r"```.*?```", "", guide.read_text(), flags=re.DOTALL)
    spans = re.findall(r"`(?:[^`]*?\s)?(tools/(?:bench/)?\w+\.py)([^`]*)`", prose)
    named = re.findall(r"`scaling ([a-z-]+)([^`]*)`", prose)
    spans += [(f"tools/{SUBCOMMANDS[name]}.py", words) for name, words in named if name in SUBCOMMANDS]
    return [(tool, re.findall(r"(?<![\w-])--[a-z][\w-]*", words)) for tool, words in spans]


@cache
def tool_module(name: str) -> ModuleType:
    """Load `tools/NAME.py`."""
    path = ROOT / name
    assert path.is_file(), f"{name}: no such tool"
    return load_tool(path)


def parse_tool(command: Command) -> None:
    """Parse the arguments of a command's tool; the arguments of its launcher are not checked here."""
    if command.words[0] == "scaling":
        name = command.words[1]
        action = [name] if SUBCOMMANDS[name] in ACTIONS else []
        tool = f"tools/{SUBCOMMANDS[name]}.py"
        command = replace(command, words=["python", tool, *action, *command.words[2:]])
    at = next((i for i, word in enumerate(command.words) if TOOL.match(word)), None)
    if at is None:
        return
    name = TOOL.match(command.words[at])[1]
    module = tool_module(name)
    words = [word for word in command.words[at + 1 :] if word != "..."]
    parse = getattr(module, "parse_args", None) or module.build_parser().parse_args
    try:
        args = parse(words)
    except SystemExit as ended:
        assert ended.code == 0, f"{command.where}: {name} does not accept {shlex.join(words)}"
        return
    check_overrides(command.where, name, args)


def list_options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser and of its actions."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    inner = (list_options(other) for action in actions for other in action.choices.values())
    return set(parser._option_string_actions).union(*inner)


def check_overrides(where: str, tool: str, args: argparse.Namespace) -> None:
    """Check that every `section.key=value` word names an existing key."""
    for word in getattr(args, "overrides", None) or getattr(args, "words", None) or []:
        key, equals, _ = word.partition("=")
        if not equals or key.startswith("["):
            continue
        if tool == "tools/sweep.py" and not key.startswith("run."):
            assert key.split(".")[0].split("[")[0] in STUDY_KEYS, f"{where}: a study has no key {key}"
        else:
            check_key(where, key.removeprefix("run."))


STUDY_KEYS = ("name", "directory", "run", "sizes", "cells", "share_trunks")


def check_key(where: str, key: str) -> None:
    """Check a dotted key of RunConfig. Keys below model.hf_config are Hugging Face's."""
    section: type = RunConfig
    for part in key.split("."):
        names = {option.name: option.type for option in fields(section)} if is_dataclass(section) else {}
        if part == "hf_config":
            return
        assert part in names, f"{where}: a configuration has no key {key}"
        section = names[part]


def check_program(command: Command) -> None:
    """Check that the program exists, and that a tool, script or Makefile target accepts its arguments."""
    program = command.words[0]
    if program in ("python", "python3", sys.executable):
        _check_python(command)
    elif program == "scaling":
        name = command.words[1] if len(command.words) > 1 else "--help"
        assert name in (*SUBCOMMANDS, "--help"), f"{command.where}: no sub-command {name}"
        if name in SUBCOMMANDS:
            parse_tool(command)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in command.words[1:]:
            assert "=" in word or word.startswith("-") or word in targets, (
                f"{command.where}: no target {word}"
            )
    elif program == "bash" or program.endswith(".sh"):
        _check_script(command, command.words[1 if program == "bash" else 0 :])
    elif program == "sbatch":
        at = next((i for i, word in enumerate(command.words) if word.endswith(".sh")), None)
        if at is not None:
            _check_script(command, command.words[at:])
    else:
        is_available = program in ELSEWHERE or program in LAUNCHERS or shutil.which(program)
        assert is_available, f"{command.where}: no program {program}"
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([word for word in command.words[1:] if word != "..."])
    if program in LAUNCHERS:
        parse_tool(command)


def _check_python(command: Command) -> None:
    words = command.words[1:]
    if words[0] == "-c":
        compile(words[1], command.where, "exec")
    elif words[0] == "-m":
        assert find_spec(words[1]), f"{command.where}: no module {words[1]}"
    elif TOOL.match(words[0]):
        parse_tool(command)
    else:
        assert (ROOT / words[0]).is_file(), f"{command.where}: no file {words[0]}"


def _check_script(command: Command, words: Sequence[str]) -> None:
    """Check that a script of this tree reads its variables, and that its tool accepts the other arguments."""
    script = ROOT / words[0]
    assert script.is_file(), f"{command.where}: no script {words[0]}"
    text = with_sources(script)
    for name in command.environment:
        is_read = re.search(rf"\b{name}\b", text) or name.startswith(
            ("NCCL_", "CUDA_", "OMP_", "WANDB_", "MASTER_")
        )
        assert is_read, f"{command.where}: {words[0]} reads no variable {name}"
    tools = sorted(set(re.findall(r"tools/\w+\.py", "\n".join(_code_lines(text)))) - {"tools/start_ranks.py"})
    if len(tools) != 1:  # the script passes its arguments to no tool, or to several
        return
    tool = tools[0]
    options = list_options(tool_module(tool).build_parser())
    for word in words[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{command.where}: {tool} has no option {word}"
        elif OVERRIDE.match(word):
            check_overrides(command.where, tool, argparse.Namespace(overrides=[word]))


def with_sources(script: Path) -> str:
    """Return the text of a script and of the scripts that it sources, recursively."""
    text = script.read_text()
    names = re.findall(r"^\s*source (examples_scaling/\S+\.sh)", text, re.MULTILINE)
    return text + "".join(with_sources(ROOT / name) for name in names)


def _code_lines(text: str) -> list[str]:
    """Return the lines that are neither comments nor tests for a file."""
    return [
        line for line in text.splitlines() if not line.lstrip().startswith("#") and "-f tools/" not in line
    ]
