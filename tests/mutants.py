"""Measure which changes of the code the tests detect.

    python tests/mutants.py objective plan tokenizer --n 5 --out build/mutants.json

Draws mutants of functions in packages of megatron/ with a seed: another operator, constant or condition. Each
is applied in a copy of the checkout, and the tests that import its module run with a time limit, those of the
module's name first. A failed test kills the mutant; a run over the limit is counted apart, since the machine
may be busy. The file of results grows with each mutant, and the same command resumes.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub,
    ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.And: ast.Or,
    ast.Or: ast.And, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
}  # fmt: skip


def mutate(node: ast.AST) -> ast.expr | None:
    """Return a changed copy of an expression, or None if there is no rule for it."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in OTHERS:
            changed.ops = [OTHERS[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OTHERS:
            changed.op = OTHERS[type(operator)]()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            changed.value = not value
        case ast.Constant(value=int(value) | float(value)):
            changed.value = value + 1
        case ast.IfExp():
            changed.body, changed.orelse = changed.orelse, changed.body
        case _:
            return None
    return changed


def list_mutants(package: str) -> Iterator[tuple[str, str, int, int, str]]:
    """Yield (name, file, begin, end, replacement) of all mutants; positions are of UTF-8 bytes."""
    for path in sorted((ROOT / "megatron" / package).rglob("*.py")):
        source = path.read_bytes()
        starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
        tree = ast.parse(source)
        # positions in f-strings are not those of the file before Python 3.12
        inside = {
            part for text in ast.walk(tree) if isinstance(text, ast.JoinedStr) for part in ast.walk(text)
        }
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            seen = 0
            for node in [node for statement in function.body for node in ast.walk(statement)]:
                changed = None if node in inside else mutate(node)
                if changed is not None and isinstance(node, ast.expr) and node.end_lineno is not None:
                    begin = starts[node.lineno - 1] + node.col_offset
                    end = starts[node.end_lineno - 1] + (node.end_col_offset or 0)
                    name = f"{path.relative_to(ROOT)}:{function.name}:{seen}:{ast.unparse(node)[:60]}"
                    seen += 1
                    yield name, str(path.relative_to(ROOT)), begin, end, f"({ast.unparse(changed)})"


def choose_tests(file: str) -> list[str]:
    """Return the test files that import a module, the one of its name first."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    words = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{name}\b")
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if words.search(path.read_text())]
    folder = f"{package.rpartition('.')[2]}/"
    paths.sort(key=lambda path: (path.stem != f"test_{name}", folder not in str(path), str(path)))
    return [str(path.relative_to(ROOT)) for path in paths]


def run_tests(copy_root: Path, files: list[str], limit_s: float) -> str:
    """Return killed, timeout or survived."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    command += ["-m", "not slow and not gpu and not ranks"]
    process = subprocess.Popen(
        command, cwd=copy_root, env={**os.environ, "PYTHONPATH": str(copy_root)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return "survived" if process.wait(limit_s) in (0, 5) else "killed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "timeout"


def main() -> None:
    """Try the mutants that have no result yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--n", type=int, default=20, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="seconds for each mutant")
    parser.add_argument("--out", type=Path, default=Path("build/mutants.json"))
    args = parser.parse_args()
    results: dict[str, str] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy_root = Path(folder) / "checkout"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "experiments", "__pycache__")
        shutil.copytree(ROOT, copy_root, ignore=ignored)
        for package in args.packages:
            mutants = list(list_mutants(package))
            drawn_mutants = random.Random(args.seed).sample(mutants, min(args.n, len(mutants)))
            for name, file, begin, end, replacement in drawn_mutants:
                if name in results:
                    continue
                source = (ROOT / file).read_bytes()
                (copy_root / file).write_bytes(source[:begin] + replacement.encode() + source[end:])
                results[name] = run_tests(copy_root, choose_tests(file), args.limit)
                (copy_root / file).write_bytes(source)
                args.out.write_text(json.dumps(results, indent=1))
                print(f"{results[name]:9s} {name} -> {replacement}", flush=True)
            counts = [results[name] for name, *_ in drawn_mutants]
            summary = ", ".join(f"{counts.count(kind)} {kind}" for kind in ("killed", "timeout", "survived"))
            print(f"{package}: {summary} of {len(mutants):,} mutants", flush=True)


if __name__ == "__main__":
    main()
