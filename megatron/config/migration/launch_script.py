"""Reader of launch scripts: finds the command that a bash script would start, without running anything.

It follows assignments (scalars, arrays, +=, export), $NAME, ${NAME:-x}, ${NAME[@]}, $((1 + 2)), line
continuations, quotes, here-documents (`cat <<EOF > FILE`), `source FILE` and `eval`. Everything that only a
shell could know, such as $(command) or a variable of the scheduler, is unknown until the caller gives it, and
an error only if the command needs it. Assignments inside if, for, while, case and functions are unknown too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.migration.argument import NO_EFFECT
from megatron.config.migration.arithmetic import evaluate_integer
from megatron.config.migration.command_line import find_argument
from megatron.config.migration.shell_tests import evaluate_test
from megatron.config.migration.shell_words import UNKNOWN, Lexed, split_commands

OPENING = ("for", "while", "until", "case", "select", "{")
CLOSING = ("fi", "done", "esac", "}")
INLINE = ("then", "do", "time", "exec", "nohup", "command", "sudo")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
FUNCTION = re.compile(r"[\w-]+\(\)")  # not NAME=(), an empty array
DECLARING = ("export", "declare", "local", "readonly", "typeset")
PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9]|[@*#])(?:\[([^\]]*)\])?(?:(:?[-=+?])(.*))?$", re.DOTALL)
VALUE_NOT_READ = ("--tensorboard-dir",)  # only whether they are given counts
MAX_BYTES = 1 << 20
FIELDS = re.compile(f"(?:{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}|[^\\s{UNKNOWN}])+")
MAX_DEPTH = 20  # of source, eval and expansions within expansions


@dataclass
class LaunchScript:
    """State of the reader.

    variables  name -> words of its value; a scalar has one
    unknown    name or $(...) -> why its value is not known
    written    path -> content of the files that the script writes with here-documents
    command    words of the last command that starts a .py file with arguments
    """

    folder: Path
    variables: dict[str, list[str]] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    unknown: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)

    def read(self, text: str, depth: int = 0) -> None:
        """Follow the commands of a text."""
        if depth > MAX_DEPTH:
            raise ValueError(f"got more than {MAX_DEPTH} scripts within scripts, expected fewer")
        # Of each open if: whether this branch runs, and whether one has run so far. None: not known, as in
        # loops and functions.
        branches: list[bool | None] = []
        has_run: list[bool | None] = []
        previous: bool | None = None  # truth of the command before, for && and ||
        is_condition = is_open = False  # between if and then; and no branch before has run
        for lexed in split_commands(text):
            words = list(lexed.words)
            is_condition = is_condition and words[0] != "then"
            while words and words[0] in INLINE:
                words.pop(0)
            head = words[0] if words else ""
            if is_condition:
                if is_open:
                    branches[-1] = has_run[-1] = _join(branches[-1], lexed.joint, self._test(words))
                continue
            if head == "if":
                branches.append(self._test(words[1:]))
                has_run.append(branches[-1])
                is_open = True
            elif head == "elif" and branches:
                # after a branch that runs no other one does
                is_open = has_run[-1] is False
                branches[-1] = {True: False, False: self._test(words[1:]), None: None}[has_run[-1]]
                has_run[-1] = branches[-1] if is_open else has_run[-1]
            elif head == "else" and branches:
                branches[-1] = None if has_run[-1] is None else not has_run[-1]
                words = words[1:]
            elif head in OPENING or FUNCTION.fullmatch(head) or head == "function" or words[1:2] == ["()"]:
                branches.append(None)
                has_run.append(None)
            is_condition = head in ("if", "elif")
            if head in CLOSING:
                branches, has_run = branches[:-1], has_run[:-1]
            elif words and not is_condition and False not in branches:
                skips = {"&&": False, "||": True}.get(lexed.joint) is previous and lexed.joint != ""
                is_unknown = lexed.joint != "" and previous is None
                if not skips or previous is None:
                    self._follow(Lexed(words, lexed.document), None in branches or is_unknown, depth)
                    previous = True if ASSIGNMENT.fullmatch(head) else self._test(words)

    def _test(self, words: list[str]) -> bool | None:
        """Return the truth of a condition; None: not known."""
        expanded = []
        for raw in words:
            values = self.expand(raw)
            expanded += values or ([""] if raw.startswith('"') else [])
        return evaluate_test(expanded)

    def _follow(self, lexed: Lexed, is_conditional: bool, depth: int) -> None:
        """Follow one simple command."""
        words = lexed.words
        names = words[1:] if words[0] in DECLARING else words
        assignments = [ASSIGNMENT.fullmatch(word) for word in names if not word.startswith("-")]
        if assignments and all(assignments) or words[0] in DECLARING:
            for match in assignments:
                if match is not None:
                    self._assign(match[1], bool(match[2]), match[3], is_conditional)
            return
        # FOO=1 BAR=2 python x.py: assignments before a command
        while words and ASSIGNMENT.fullmatch(words[0]) and not words[0].startswith("-"):
            words = words[1:]
        if words[0] in ("source", ".") and len(words) > 1:
            self._source(self.expand(words[1])[0], depth)
        elif words[0] == "eval":
            self.read(" ".join(word for raw in words[1:] for word in self.expand(raw)), depth + 1)
        elif lexed.document is not None:
            self._write(words, lexed.document)
        else:
            self._consider(words)

    def _assign(self, name: str, appends: bool, raw: str, is_conditional: bool) -> None:
        if name in self.fixed:
            return  # given by the caller
        if is_conditional:
            self.variables.pop(name, None)
            self.unknown[name] = "it is assigned under a condition"
            return
        if raw.startswith("(") and raw.endswith(")"):
            value = [word for lexed in split_commands(raw[1:-1], separators="") for w in lexed.words
                     for word in self.expand(w)]  # fmt: skip
            self.variables[name] = [*(self.variables.get(name, []) if appends else []), *value]
            _check_size(name, self.variables[name])
        else:
            # no word splitting in an assignment
            value = [" ".join(self.expand(raw, splits=False))]
            before = self.variables.get(name, [""])[0] if appends else ""
            self.variables[name] = [before + value[0]]
            _check_size(name, self.variables[name])
        self.unknown.pop(name, None)

    def _source(self, path: str, depth: int) -> None:
        for folder in (Path(), self.folder, *self.folder.resolve().parents):
            file = folder / path
            if UNKNOWN not in path and file.is_file():
                self.read(read_script(file), depth + 1)
                return
        self.unknown[f"source {path.replace(UNKNOWN, '')}"] = "this file is not there"

    def _write(self, words: list[str], document: tuple[str, bool]) -> None:
        """Record the file that `cat <<EOF > FILE` writes."""
        if ">" not in words[:-1]:
            return
        text, expands = document
        target = self.expand(words[words.index(">") + 1])
        self.written[target[0]] = "".join(self.expand(text, splits=False, quoted=True)) if expands else text

    def _consider(self, words: list[str]) -> None:
        """Keep a command that starts a .py file with arguments of two dashes."""
        expanded: list[str] = []
        for raw in words:
            if re.match(r"[0-9&]?[<>]", raw):
                break
            expanded += self.expand(raw)
        if expanded[:1] == ["bash"] and "-c" in expanded:
            self.read(expanded[-1], 1)
            return
        script = next((i for i, word in enumerate(expanded) if word.endswith(".py")), None)
        if script is not None and any(word.startswith(("--", UNKNOWN)) for word in expanded[script + 1 :]):
            self.command = expanded

    def expand(self, raw: str, splits: bool = True, quoted: bool = False) -> list[str]:
        """Return the words of a raw word: quotes removed, variables replaced, unquoted values split."""
        words, is_started = [""], False
        i, quote = 0, '"' if quoted else ""
        while i < len(raw):
            char = raw[i]
            if char == "\\" and quote != "'":
                # inside double quotes only these characters lose their backslash
                follows = raw[i + 1 : i + 2]
                if follows == "\n":  # a line continuation inside quotes
                    i += 2
                    continue
                words[-1] += follows if not quote or follows in '"\\$`' else char + follows
                i, is_started = i + 2, True
            elif char in "'\"" and not quoted and quote in ("", char):
                quote, is_started, i = ("" if quote else char), True, i + 1
            elif char in "$`" and quote != "'":
                values, i = self._expand_parameter(raw, i)
                if splits and not quote:
                    # words are split outside the texts of unknown values
                    parts = [part for value in values for part in FIELDS.findall(value)]
                else:
                    parts = values if quote and len(values) != 1 else [" ".join(values)]
                for n, part in enumerate(parts):
                    words[-1:] = [words[-1] + part] if n == 0 else [words[-1], part]
                is_started = is_started or bool(parts)
            else:
                words[-1] += char
                i, is_started = i + 1, True
        return words if is_started else []

    def _expand_parameter(self, raw: str, i: int) -> tuple[list[str], int]:
        """Return (value, index after it) of the expansion that begins at raw[i]."""
        if raw[i] == "`":
            end = raw.find("`", i + 1) + 1 or len(raw)
            return [self._substitute(raw[i + 1 : end - 1], raw[i:end])], end
        if raw.startswith("$((", i):
            # past the brackets inside; without the closing ones, the rest of the word
            end = find_closing(raw, i + 1, "(", ")")
            return [self._calculate(raw[i + 3 : end - 2], raw[i:end])], end
        if raw.startswith("$(", i):
            end = find_closing(raw, i + 1, "(", ")")
            return [self._substitute(raw[i + 2 : end - 1], raw[i:end])], end
        if raw.startswith("${", i):
            end = find_closing(raw, i + 1, "{", "}")
            return self._lookup(raw[i + 2 : end - 1]), end
        match = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]").match(raw, i + 1)
        return (self._lookup(match[0]), match.end()) if match else (["$"], i + 1)

    def _lookup(self, parameter: str) -> list[str]:
        """Return the value of NAME, NAME[0], NAME[@] or NAME:-default."""
        match = PARAMETER.fullmatch(parameter)
        if match is None:
            return [self._mark("${" + parameter + "}")]
        name, index, operator, default = match.groups()
        value = self.variables.get(name)
        if index is not None and name in self.fixed and value is not None:
            value = value[0].split()  # a list given with --set
        if (
            operator
            and operator.strip(":") in "-="
            and (value is None or value == [""])
            and name not in self.unknown
        ):
            return self.expand(default or "", splits=False)
        if operator and operator.strip(":") == "+":
            return [] if value is None else self.expand(default or "", splits=False)
        if value is None:
            return [self._mark(f"${name}")]
        if index in ("@", "*"):
            return value
        if index is None or not index.isdecimal() or len(index) > 6:
            return value[:1]
        return [value[int(index)]] if int(index) < len(value) else []

    def _calculate(self, text: str, raw: str) -> str:
        named = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: "".join(self._lookup(match[1])), text)
        if UNKNOWN in named:
            return named
        try:
            return str(evaluate_integer(named))
        except ValueError:
            return self._mark(raw)

    def _substitute(self, command: str, raw: str) -> str:
        """Return the output of `pwd`, the only command whose output is known."""
        return str(Path.cwd()) if command.strip() == "pwd" else self._mark(raw)

    def _mark(self, what: str) -> str:
        """Return a placeholder of an unknown value, which survives in the words that contain it."""
        return f"{UNKNOWN}{what}{UNKNOWN}"


def _check_size(name: str, words: list[str]) -> None:
    """Raise ValueError for a value that doubles in every line, until it fills the memory."""
    if sum(map(len, words)) > MAX_BYTES:
        raise ValueError(f"{name}: got a value of more than {MAX_BYTES >> 20} MB, expected a launch script")


def _join(left: bool | None, joint: str, right: bool | None) -> bool | None:
    """Return the truth of `left && right` or `left || right`; None: not known."""
    if joint == "&&":
        return False if False in (left, right) else None if None in (left, right) else True
    if joint == "||":
        return True if True in (left, right) else None if None in (left, right) else False
    return None


def find_closing(text: str, begin: int, opening: str, closing: str) -> int:
    """Return the index after the bracket that closes the one at `begin`; the end of the text without it."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if not depth:
            return i + 1
    return len(text)


def read_script(path: Path) -> str:
    """Return the text of a script. Raises FileNotFoundError, and ValueError for one that is too large."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path}: got more than {MAX_BYTES >> 20} MB, expected a launch script")
    # the marker of unknown values has no meaning in a script
    return path.read_text(encoding="utf-8", errors="replace").replace(UNKNOWN, "")


def read_launch_script(path: Path, given: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return (words of the training command, path -> content of the files that the script writes).

    given   variables whose value the caller knows; assignments to them are ignored

    Raises ValueError if there is no such command, or with the name of an unknown value that it contains.
    """
    script = LaunchScript(path.parent, {name: [value] for name, value in given.items()}, frozenset(given))
    script.read(read_script(path))
    if not script.command:
        raise ValueError(f"{path}: no command that starts a .py file with arguments. Give them after --.")
    return _check_words(script, path), script.written


def _check_words(script: LaunchScript, path: Path) -> list[str]:
    """Return the command's words. Raises ValueError for an unknown value, unless nothing depends on it."""
    start = next(i for i, word in enumerate(script.command) if word.endswith(".py"))
    words, name = list(script.command), ""
    for i, word in enumerate(words):
        name = word.partition("=")[0] if word.startswith("--") else name
        argument = find_argument(name.lstrip("-")) if name else None
        is_used = i > start and (argument is None or argument.outcome != NO_EFFECT)
        is_used = is_used and name not in VALUE_NOT_READ
        if UNKNOWN in word and is_used:
            raise ValueError(f"{path}: {_describe_unknown(script, name, word)}")
        words[i] = word.replace(UNKNOWN, "")
    return words


def _describe_unknown(script: LaunchScript, name: str, word: str) -> str:
    """Return what is unknown in a word after an argument, why, and how to give it."""
    what = next((part for part in word.split(UNKNOWN)[1:] if part), "a value")
    reason = script.unknown.get(what.lstrip("$"), "its value is known only when the script runs")
    missing = next((f"; {text}: {why}" for text, why in script.unknown.items() if " " in text), "")
    fix = "Write its value into the script."
    if re.fullmatch(r"\$\w+", what):
        fix = f"Give it with --set {what[1:]}=VALUE."
    return f"{name} {what}: {reason}{missing}. {fix}"
