"""Measure which changes of the code the tests detect, with the mutations of cosmic-ray.

    pip install cosmic-ray pytest-cov
    python -m pytest -n 2 -m "not gpu and not slow" --cov=megatron --cov-context=test --cov-report=
    python tests/mutants.py data laws --n 20 --out build/mutants.json
    python tests/mutants.py data laws --checkout ../before --common . --out build/before.json

Draws functions of each package with a seed, and a mutation of each. The mutation is applied in a copy of the
checkout, and the tests that ran the changed line run with a time limit, tests of the module's name first,
without those that failed before; for a line that only other processes run, the tests of its package and of
ranks. A failed test kills the mutant; a run over the limit is counted apart, since the machine may be busy.
The file of results grows with each mutant, and the same command resumes. With `--common` only functions are
drawn that another checkout has, too.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from coverage import CoverageData

# "|" is mostly part of an annotation, and the others need arguments or change nothing
SKIPPED = ("BitOr", "NoOp", "Variable", "Decorator")
NAMES = [name for name in sorted(operator_names()) if not any(word in name for word in SKIPPED)]
OPERATORS = {name: get_operator(name)() for name in NAMES}
IGNORED = shutil.ignore_patterns(".git", ".venv", "build", "experiments", "__pycache__")


class Mutant(NamedTuple):
    """A mutation of a file: the n-th position of an operator."""

    file: Path
    line: int
    operator: str
    occurrence: int


def list_functions(root: Path, package: str) -> Iterator[tuple[str, Path, range]]:
    """Yield (name, file, lines of the body) of the functions and methods of a package."""
    for path in sorted((root / "megatron" / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        classes = [(f"{node.name}.", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
        for prefix, body in [("", tree.body), *classes]:
            for node in body:
                if isinstance(node, ast.FunctionDef):
                    yield prefix + node.name, path, range(node.body[0].lineno, (node.end_lineno or 0) + 1)


def list_mutants(file: Path) -> Iterator[Mutant]:
    """Yield every mutation of a file, in the order in which cosmic-ray counts them."""
    nodes = list(ast_nodes(get_ast(file.read_text())))
    for name, operator in OPERATORS.items():
        positions = [begin for node in nodes for begin, _ in operator.mutation_positions(node)]
        for occurrence, (line, _) in enumerate(positions):
            yield Mutant(file, line, name, occurrence)


def draw_mutants(root: Path, common: Path, package: str, seed: int) -> Iterator[tuple[str, Mutant]]:
    """Yield (name, mutation) for the functions of a package in random order, one of each function."""
    others = {name for name, *_ in list_functions(common, package)}
    functions = {name: place for name, *place in list_functions(root, package) if name in others}
    mutants: dict[Path, list[Mutant]] = {}
    for name in random.Random(seed).sample(sorted(functions), len(functions)):
        path, lines = functions[name]
        by_line = defaultdict(list)
        for mutant in mutants.setdefault(path, list(list_mutants(path))):
            if mutant.line in lines:
                by_line[mutant.line].append(mutant)
        if by_line:
            # a line first: an operator of two numbers has eleven mutations, a comparison in words two
            generator = random.Random(f"{seed} {name}")
            line = generator.choice(sorted(by_line))
            yield name, generator.choice(by_line[line])


def choose_tests(root: Path, mutant: Mutant, coverage: CoverageData) -> list[str]:
    """Return the tests that ran a line, without those that fail anyway."""
    failed = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failures = set(json.loads(failed.read_text())) if failed.is_file() else set()
    contexts = coverage.contexts_by_lineno(str(mutant.file)).get(mutant.line, [])
    tests = {context.partition("|")[0] for context in contexts} - failures - {""}
    if not tests:
        return ["tests/ranks", f"tests/{mutant.file.relative_to(root).parts[1]}"]
    package, stem = mutant.file.parent.name, mutant.file.stem
    return sorted(tests, key=lambda test: (f"test_{stem}.py" not in test, f"/{package}/" not in test, test))


def run_tests(root: Path, tests: list[str], limit_s: float) -> str:
    """Return killed, timeout or survived."""
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    process = subprocess.Popen(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return "survived" if process.wait(limit_s) in (0, 5) else "killed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "timeout"


def try_mutant(root: Path, copy_root: Path, mutant: Mutant, tests: list[str], limit_s: float) -> str:
    """Return the outcome of a mutant, which is applied in the copy."""
    source, place = mutant.file.read_text(), copy_root / mutant.file.relative_to(root)
    changed = mutate_code(source, OPERATORS[mutant.operator], mutant.occurrence)
    place.write_text(changed)
    try:
        return run_tests(copy_root, tests, limit_s)
    finally:
        place.write_text(source)


def main() -> None:
    """Try the mutants that have no result yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--checkout", type=Path, default=Path(), help="with its .coverage")
    parser.add_argument("--common", type=Path, help="draw only functions that this checkout has, too")
    parser.add_argument("--n", type=int, default=20, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="seconds for each mutant")
    parser.add_argument("--out", type=Path, default=Path("build/mutants.json"))
    args = parser.parse_args()
    root = args.checkout.resolve()
    results: dict[str, str] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    coverage = CoverageData(str(root / ".coverage"))
    coverage.read()
    with tempfile.TemporaryDirectory() as folder:
        copy_root = Path(folder) / "checkout"
        shutil.copytree(root, copy_root, ignore=IGNORED)
        for package in args.packages:
            outcomes = []
            for name, mutant in draw_mutants(root, args.common or root, package, args.seed):
                if len(outcomes) == args.n:
                    break
                place = f"{mutant.file.relative_to(root)}:{mutant.line} {name} {mutant.operator}"
                if place not in results:
                    tests = choose_tests(root, mutant, coverage)
                    results[place] = try_mutant(root, copy_root, mutant, tests, args.limit)
                    args.out.write_text(json.dumps(results, indent=1))
                    print(f"{results[place]:9s} {place}, {len(tests)} tests", flush=True)
                outcomes.append(results[place])
            counts = [f"{outcomes.count(kind)} {kind}" for kind in ("killed", "timeout", "survived")]
            print(f"{package}: {', '.join(counts)}", flush=True)


if __name__ == "__main__":
    main()
