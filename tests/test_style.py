"""Names, prose and signatures: banned identifiers and phrases, and types of all parameters and results."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BANNED = frozenset(
    ["told", "held", "asked", "found", "wanted", "taken", "one", "each", "here", "there", "own", "mine"]
    + ["made", "known", "kept", "drawn", "said", "fellow"]
)
PHRASES = re.compile(r"\b(by itself|(?:is|are|was|were) told|is no number)\b")
KINDS = {".py", ".md", ".sh", ".cpp", ".h", ".inc", ".yaml", ".toml"}  # files with text that a reader sees


@cache
def parse_sources(top: str) -> list[tuple[Path, ast.Module]]:
    """Return the Python files below a folder with their syntax trees."""
    paths = sorted((ROOT / top).rglob("*.py"))
    return [(path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


NAMES: dict[type, str] = {  # field of the nodes that define an identifier
    ast.FunctionDef: "name", ast.AsyncFunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg",
    ast.Name: "id", ast.Attribute: "attr", ast.alias: "asname", ast.ExceptHandler: "name",
    ast.MatchAs: "name", ast.MatchStar: "name",
}  # fmt: skip


def list_bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (identifier, line) of all that code defines: functions, parameters, variables, attributes."""
    for node in ast.walk(tree):
        name = getattr(node, NAMES[type(node)]) if type(node) in NAMES else None
        if name is not None and isinstance(getattr(node, "ctx", ast.Store()), ast.Store):
            yield name, node.lineno


def find_banned_names(tree: ast.AST) -> list[tuple[str, int]]:
    """Return (identifier, line) of the bindings that STYLE bans, whatever underscores they have."""
    return [(name, line) for name, line in list_bindings(tree) if name.strip("_") in BANNED]


def find_untyped(tree: ast.AST) -> list[tuple[str, int]]:
    """Return (name, line) of the functions without the type of a parameter or of the result."""
    untyped = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            names = [arg.arg for arg in every if arg is not None and arg.annotation is None]
            if node.returns is None or set(names) - {"self", "cls"}:
                untyped.append((node.name, node.lineno))
    return untyped


def test_no_identifier_is_banned() -> None:
    bad = [
        f"{path}:{line}: {name}"
        for top in ("megatron", "tools", "tests")
        for path, tree in parse_sources(top)
        for name, line in find_banned_names(tree)
    ]
    assert not bad, "use the word for what it is (STYLE):\n" + "\n".join(bad)


def test_every_signature_has_types() -> None:
    bad = [
        f"{path}:{line}: {name}"
        for top in ("megatron", "tools")
        for path, tree in parse_sources(top)
        for name, line in find_untyped(tree)
    ]
    assert not bad, "\n".join(bad)


def test_no_text_has_a_phrase_that_the_style_replaces() -> None:
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if Path(name).suffix in KINDS]
    bad = [
        f"{path}:{number}: {match.group()}"
        for path in paths
        if path != Path(__file__) and path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in PHRASES.finditer(line)
    ]
    assert not bad, "write default, reports, is NaN or Inf:\n" + "\n".join(bad)


def test_the_checks_report_what_they_should() -> None:
    tree = ast.parse(
        "def f(told, x: int) -> int:\n"
        "    self._held = [one for one in x]\n"
        "    with x as found:\n"
        "        pass\n"
        "def g(self, *x: int): ...\n"
    )
    assert sorted(find_banned_names(tree)) == [("_held", 2), ("found", 3), ("one", 2), ("told", 1)]
    assert find_untyped(tree) == [("f", 1), ("g", 5)]
    phrases = [match.group() for match in PHRASES.finditer("by itself 3; is told; itself")]
    assert phrases == ["by itself", "is told"]
