"""Names and prose: banned identifiers and phrases, fragment docstrings, names with two meanings."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BANNED = frozenset(
    ["told", "held", "asked", "found", "wanted", "taken", "one", "each", "here", "there", "own", "mine"]
    + ["made", "known", "kept", "drawn", "said", "fellow"]
)
# a docstring that begins so is a fragment, not a sentence or a noun phrase
FRAGMENT = re.compile(r"(Of|What|Where|As|Whether|How|Which|Who|Whose|From|By|With|That)\b")
PHRASES = re.compile(r"\b(by itself|(?:is|are|was|were) told|is no number)\b")
# this file lists the phrases; licences and lock files are not ours
NOT_PROSE = ("tests/test_style.py",)
# exported to Hugging Face folders, where it stands alone
ALONE = "megatron/checkpoint/convert/exported/"


def sources(*tops: str) -> list[Path]:
    """Python files below these folders, without build products."""
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def prose() -> list[Path]:
    """Files with text that a reader sees: code, guides and scripts under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    kinds = {".py", ".md", ".sh", ".cpp", ".h", ".inc", ".yaml", ".toml"}
    names = [name for name in listed.stdout.split("\0") if Path(name).suffix in kinds]
    return [ROOT / name for name in names if name not in NOT_PROSE and (ROOT / name).is_file()]


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(identifier, line) of everything that code defines: functions, parameters, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.alias | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            name = node.asname if isinstance(node, ast.alias) else node.name
            if name:
                yield name, node.lineno


def banned_names(tree: ast.AST) -> list[tuple[str, int]]:
    """(identifier, line) of the bindings that STYLE bans, whatever underscores they have."""
    return [(name, line) for name, line in bindings(tree) if name.strip("_") in BANNED]


def fragments(tree: ast.AST) -> list[tuple[str, int]]:
    """(first line, line number) of docstrings that begin as a fragment."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    seen = []
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            text = ast.get_docstring(node)
            if text and FRAGMENT.match(text):
                seen.append((text.splitlines()[0], node.body[0].lineno))
    return seen


def banned_phrases(text: str) -> list[tuple[str, int]]:
    """(phrase, line) of the phrases that STYLE replaces."""
    return [
        (match.group(), number)
        for number, line in enumerate(text.splitlines(), 1)
        for match in PHRASES.finditer(line)
    ]


def public_names(tree: ast.Module) -> list[tuple[str, int]]:
    """(name, line) of the functions and classes of a module that others may import."""
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (node.name, node.lineno)
        for node in tree.body
        if isinstance(node, kinds) and not node.name.startswith("_")
    ]


def at(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {text}"


def test_no_identifier_is_banned() -> None:
    bad = [
        at(path, line, name)
        for path in sources("megatron", "tools", "tests")
        for name, line in banned_names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not bad, "use the word for what it is (STYLE):\n" + "\n".join(bad)


def test_no_docstring_begins_as_a_fragment() -> None:
    bad = [
        at(path, line, first)
        for path in sources("megatron", "tools", "tests")
        for first, line in fragments(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not bad, "begin with a verb or a noun phrase:\n" + "\n".join(bad)


def test_no_text_has_a_phrase_that_the_style_replaces() -> None:
    bad = [
        at(path, line, phrase)
        for path in prose()
        for phrase, line in banned_phrases(path.read_text(encoding="utf-8"))
    ]
    assert not bad, "write default, reports, is NaN or Inf:\n" + "\n".join(bad)


def test_a_public_name_and_a_module_name_mean_one_thing_in_their_package() -> None:
    names, modules = defaultdict(list), defaultdict(list)
    for path in sources("megatron"):
        if str(path.relative_to(ROOT)).startswith(ALONE):
            continue
        package = path.relative_to(ROOT / "megatron").parts[0]
        if path.stem != "__init__":
            modules[package, path.name].append(at(path, 1, "module"))
        for name, line in public_names(ast.parse(path.read_text(encoding="utf-8"))):
            names[package, name].append(at(path, line, name))
    bad = [", ".join(places) for places in (*names.values(), *modules.values()) if len(places) > 1]
    assert not bad, "give each its own name:\n" + "\n".join(bad)


def test_the_checks_report_what_they_should() -> None:
    tree = ast.parse(
        '"""What a module is."""\n'
        "def f(told, x):\n"
        '    """Return x."""\n'
        "    self._held = [one for one in x]\n"
        "    with x as found:\n"
        "        pass\n"
        "class Public:\n"
        '    """Of a run."""\n'
        "def _private(): ...\n"
    )
    assert sorted(banned_names(tree)) == [("_held", 4), ("found", 5), ("one", 4), ("told", 2)]
    assert sorted(fragments(tree)) == [("Of a run.", 8), ("What a module is.", 1)]
    assert public_names(tree) == [("f", 2), ("Public", 7)]
    assert banned_phrases("a\nby itself 3; it is told") == [("by itself", 2), ("is told", 2)]
    assert not banned_phrases("the head itself")
