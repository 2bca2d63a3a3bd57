"""The commands of the guides, taken out of their code blocks, and checked without running them."""

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from megatron.command import load_tool
from megatron.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples_scaling/**/*.md"))]
SHELL = ("sh", "bash", "console", "shell")
OPERATORS = ("|", "&&", "||", ";", "&", "\n")
KEYWORDS = ("do", "then", "else", "!", "exec", "time", "export")
ENDS = ("done", "fi", "for", "while", "if", "case", "esac")
# what a reader has from elsewhere, and a machine that tests need not have
ELSEWHERE = (
    ".", "apt-get", "autoload", "awk", "bashcompinit", "brew", "cat", "cd", "chmod", "compgen",
    "complete", "conda", "cp", "curl", "deactivate", "deepspeed", "docker", "echo", "enroot", "env",
    "export", "git", "grep", "head", "hf", "jq", "kill", "less", "ln", "ls", "make", "mamba",
    "micromamba", "mkdir", "module", "mpirun", "mv", "nohup", "nproc", "nvidia-smi", "openssl",
    "podman", "rm", "rsync", "salloc", "sbatch", "scancel", "scontrol", "scp", "sed", "set", "sinfo",
    "sort", "source", "squeue", "srun", "ssh", "sudo", "tail", "tar", "tee", "tensorboard", "test",
    "tmux", "ulimit", "umask", "unset", "uv", "wandb", "watch", "wget", "xargs", "zstd",
)  # fmt: skip
LAUNCHERS = ("torchrun", "srun", "mpirun", "mpiexec", "deepspeed", "docker", "podman", "enroot", "apptainer")
TOOL = re.compile(r"(?:^|.*/)(tools/(?:bench/)?\w+\.py)$")
OVERRIDE = re.compile(r"^[A-Za-z_][\w.]*=")
TEXTS = ("-c", "--prompt", "--property")  # options of which the value is no path


@dataclass(frozen=True)
class Command:
    """One simple command: the words after `NAME=value` assignments, and what the guide shows after it."""

    where: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    output: str | None = None
    text: str = ""


def tokens(text: str) -> list[str]:
    """Words and operators of a line of shell. ValueError where a quotation is open."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def without_comment(text: str) -> str:
    """A line up to a `#` that begins a word outside of quotes. shlex would also cut `a#b`."""
    quote = ""
    for i, letter in enumerate(text):
        if letter == quote:
            quote = ""
        elif not quote and letter in "'\"":
            quote = letter
        elif not quote and letter == "#" and (i == 0 or text[i - 1].isspace()):
            return text[:i]
    return text


def logical_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """(index of its first line, text) of each line, joined where it goes on: a backslash, a quote, a pipe."""
    held, first = "", 0
    ends = ""
    for i, line in enumerate(lines):
        if ends:  # within a here-document
            ends = "" if line.strip() == ends else ends
            continue
        first = first if held else i
        held = without_comment(held + (line if held else line.strip())).rstrip(" ")
        if held.endswith("\\"):
            held = held[:-1] + " "
            continue
        try:
            words = tokens(held)
        except ValueError:
            held += "\n"
            continue
        if words and words[-1] in ("|", "&&", "||"):
            held += " "
            continue
        if found := re.search(r"<<-?\s*['\"]?(\w+)", held):
            ends = found[1]
        yield first, held
        held = ""
    assert not held, f"a command has no end: {held}"


def split_commands(
    lines: Sequence[str], where: str = "", first: int = 0, outputs: dict[int, str] | None = None
) -> Iterator[Command]:
    """The simple commands of some lines of shell, in order. `outputs`: what is shown after a line."""
    for i, text in logical_lines(lines):
        simple: list[list[str]] = [[]]
        for word in tokens(text):
            if word in OPERATORS:
                simple.append([])
            else:
                simple[-1].append(word)
        for words in simple:
            if command := _simple(words, f"{where}:{first + i}", text, (outputs or {}).get(i)):
                yield command


def _simple(words: list[str], where: str, text: str, output: str | None) -> Command | None:
    environment: dict[str, str] = {}
    kept, writes, skip = [], [], False
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if skip:
            skip = False
        elif word in (">", ">>", "<", "<<", "<<<", ">&", "&>"):
            skip = True
            if word in (">", ">>"):
                writes.append(following)
        elif (
            re.fullmatch(r"\d", word)
            and following.startswith((">", "<"))
            or not kept
            and (word in KEYWORDS and word != "export" or word in ("{", "}"))
        ):
            continue
        elif not kept and OVERRIDE.match(word) and "." not in word.partition("=")[0]:
            name, _, value = word.partition("=")
            environment[name] = value
        else:
            kept.append(word)
    if not kept or kept[0] in ENDS:
        return None
    return Command(where, kept, environment, writes, output, text)


def commands_of(guide: Path) -> list[Command]:
    """Every command of a guide's shell blocks. In a block with `$ ` lines, the others are output.

    What a ```text block shows was captured: it holds losses and times, and is not compared.
    """
    found: list[Command] = []
    lines = guide.read_text().splitlines()
    kind, start = None, 0
    for i, line in enumerate([*lines, ""]):
        if line.startswith("```") and kind is None:
            kind, start = line[3:].strip().split(" ")[0], i + 1
        elif line.startswith("```"):
            if kind in SHELL:
                found += _block(lines[start:i], str(guide.relative_to(ROOT)), start + 1)
            elif kind == "text" and any(shown.startswith("$ ") for shown in lines[start:i]):
                begin = next(j for j in range(start, i) if lines[j].startswith("$ "))
                captured = _block(lines[begin:i], str(guide.relative_to(ROOT)), begin + 1)
                found += [replace(command, output=None) for command in captured]
            kind = None
        elif kind is None and re.match(r"    (python|torchrun|bash|make) ", line):
            found += split_commands([line.strip()], str(guide.relative_to(ROOT)), i + 1)
    return found


def _block(lines: list[str], where: str, first: int) -> Iterator[Command]:
    if not any(line.startswith("$ ") for line in lines):
        yield from split_commands(lines, where, first)
        return
    i = 0
    while i < len(lines):
        start = i
        assert lines[i].startswith("$ "), f"{where}: output before the first command"
        told, i = [lines[i][2:]], i + 1
        while told[-1].endswith("\\"):
            told.append(lines[i])
            i += 1
        shown = []
        while i < len(lines) and not lines[i].startswith("$ "):
            shown.append(lines[i] + "\n")
            i += 1
        yield from split_commands(told, where, first + start, {0: "".join(shown)})


def inline_commands(guide: Path) -> list[tuple[str, list[str]]]:
    """(tool, its options) of every `tools/x.py --option ...` in a guide's prose."""
    prose = re.sub(r"```.*?```", "", guide.read_text(), flags=re.DOTALL)
    spans = re.findall(r"`(?:[^`]*?\s)?(tools/(?:bench/)?\w+\.py)([^`]*)`", prose)
    return [(tool, re.findall(r"(?<![\w-])--[a-z][\w-]*", words)) for tool, words in spans]


@cache
def tool_module(name: str) -> ModuleType:
    """`tools/NAME.py`, loaded."""
    path = ROOT / name
    assert path.is_file(), f"{name}: no such tool"
    return load_tool(path)


def parse_tool(command: Command) -> None:
    """Let the tool of a command parse its words; the words of what launches it are left to that."""
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
        assert ended.code == 0, f"{command.where}: {name} does not understand {shlex.join(words)}"
        return
    check_overrides(command.where, name, args)


def check_overrides(where: str, tool: str, args: argparse.Namespace) -> None:
    """Every `section.key=value` word names a key that there is."""
    for word in getattr(args, "overrides", None) or getattr(args, "words", None) or []:
        key, equals, _ = word.partition("=")
        if not equals or key.startswith("["):
            continue
        if tool == "tools/sweep.py" and not key.startswith("run."):
            assert key.split(".")[0].split("[")[0] in STUDY_KEYS, f"{where}: a study has no key {key}"
        else:
            check_key(where, key.removeprefix("run."))


STUDY_KEYS = ("name", "directory", "run", "sizes", "grids", "share_trunks")


def check_key(where: str, key: str) -> None:
    """A dotted key of RunConfig. What is under model.hf_config has names of others."""
    held: type = RunConfig
    for part in key.split("."):
        names = {one.name: one.type for one in fields(held)} if is_dataclass(held) else {}
        if part == "hf_config":
            return
        assert part in names, f"{where}: a configuration has no key {key}"
        held = names[part]


def check_program(command: Command) -> None:
    """The program exists; a tool, a script or a Makefile's target of this tree knows its words."""
    program = command.words[0]
    if program in ("python", "python3", sys.executable):
        _check_python(command)
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
        known = program in ELSEWHERE or program in LAUNCHERS or shutil.which(program)
        assert known, f"{command.where}: no program {program}"
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([word for word in command.words[1:] if word != "..."])
    if program in LAUNCHERS:
        parse_tool(command)


def _check_python(command: Command) -> None:
    words = command.words[1:]
    if not words or words[0] in ("--version", "-V"):
        return
    if words[0] == "-c":
        compile(words[1], command.where, "exec")
    elif words[0] == "-m":
        assert find_spec(words[1]), f"{command.where}: no module {words[1]}"
    elif TOOL.match(words[0]):
        parse_tool(command)
    else:
        assert (ROOT / words[0]).is_file(), f"{command.where}: no file {words[0]}"


def _check_script(command: Command, words: Sequence[str]) -> None:
    """A script of this tree: its variables are in it, and the words that it passes on are known."""
    script = ROOT / words[0]
    if words[0].startswith("-"):
        return
    assert script.is_file(), f"{command.where}: no script {words[0]}"
    text = with_sources(script)
    for name in command.environment:
        known = re.search(rf"\b{name}\b", text) or name.startswith(
            ("NCCL_", "CUDA_", "OMP_", "WANDB_", "MASTER_")
        )
        assert known, f"{command.where}: {words[0]} reads no variable {name}"
    tools = sorted(set(re.findall(r"tools/\w+\.py", "\n".join(_code(text)))) - {"tools/start_ranks.py"})
    if len(tools) != 1:  # its words go to none, or to several
        return
    tool = tools[0]
    options = tool_module(tool).build_parser()._option_string_actions
    for word in words[1:]:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{command.where}: {tool} knows no {word}"
        elif OVERRIDE.match(word):
            check_overrides(command.where, tool, argparse.Namespace(overrides=[word]))


def with_sources(script: Path) -> str:
    """A script and what it sources from this tree, and that in turn."""
    text = script.read_text()
    names = re.findall(r"^\s*source (examples_scaling/\S+\.sh)", text, re.MULTILINE)
    return text + "".join(with_sources(ROOT / name) for name in names)


def _code(text: str) -> list[str]:
    """Lines that are no comments and no tests of a file's being there."""
    return [
        line for line in text.splitlines() if not line.lstrip().startswith("#") and "-f tools/" not in line
    ]
