"""Size of every package in lines of code (without docstrings, comments and blanks), and limits of style.

A budget is a ceiling for the whole.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUDGETS = {
    "megatron/*.py": 800, "megatron/config": 1600, "megatron/plan": 1050, "megatron/tokenizer": 1150,
    "megatron/text": 2300, "megatron/data": 1000, "megatron/model": 380, "megatron/kernels": 950,
    "megatron/objective": 300, "megatron/optim": 550, "megatron/mixture": 3000, "megatron/parallel": 1050,
    "megatron/engine": 1150, "megatron/checkpoint": 1900, "megatron/train": 1300, "megatron/evaluation": 1700,
    "megatron/generation": 330, "megatron/laws": 4400, "megatron/study": 3000, "megatron/report": 1900,
    "tools/*.py": 2400, "tools/bench": 1900, "tests": 24500,
}  # fmt: skip
MAX_FUNCTION_LINES, N_LONGER = 60, 7
COMMENTS_PER_100 = 8.5
N_TOOLS = 24


@cache
def measure(path: Path) -> tuple[int, int, list[int]]:
    """Return (code lines, comment lines, lines of each function) of a file."""
    source = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    lengths = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lengths.append((node.end_lineno or 0) - node.lineno + 1)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str())) as first:
                    docstrings.update(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = [
        line.strip() for i, line in enumerate(source.splitlines(), 1) if line.strip() and i not in docstrings
    ]
    comments = sum(line.startswith("#") for line in lines)
    return len(lines) - comments, comments, lengths


def list_files(place: str) -> list[Path]:
    return sorted(ROOT.glob(place) if "*" in place else (ROOT / place).rglob("*.py"))


@pytest.mark.parametrize("place", BUDGETS)
def test_a_package_is_within_its_budget(place: str) -> None:
    size = sum(measure(path)[0] for path in list_files(place))
    assert size <= BUDGETS[place], f"{place}: got {size:,} lines of code, expected {BUDGETS[place]:,} or less"


def test_code_is_not_denser_than_it_was() -> None:
    """Shorter by doing less, not by longer functions or fewer comments."""
    files = [measure(path) for path in list_files("megatron")]
    longer = sum(length > MAX_FUNCTION_LINES for _, _, lengths in files for length in lengths)
    assert longer <= N_LONGER, f"got {longer} functions of more than {MAX_FUNCTION_LINES} lines"
    code, comments = (sum(file[i] for file in files) for i in (0, 1))
    assert 100 * comments / code >= COMMENTS_PER_100
    assert len(list_files("tools/*.py")) <= N_TOOLS
