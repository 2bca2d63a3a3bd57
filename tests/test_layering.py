"""Import order of the packages, read from the syntax trees."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from megatron.cli import find_extra

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron"

LAYER = {
    "io": 0, "log": 0, "cli": 0, "config": 0,
    "data": 1, "plan": 1,
    "tokenizer": 2, "text": 2, "model": 2, "kernels": 2, "objective": 2, "optim": 2,
    "mixture": 3, "parallel": 3,
    "engine": 4, "checkpoint": 4,
    "evaluation": 5, "generation": 5,
    "train": 6,
}  # fmt: skip
ALLOWED_WITHIN_LAYER = {
    ("plan", "data"), ("text", "tokenizer"), ("model", "kernels"),
    ("objective", "kernels"),
    ("evaluation", "generation"),
}  # fmt: skip
SIDE = {  # packages beside the layers: what each may import besides itself
    "laws": {"io", "log"},
    "study": {"plan", "laws"} | {part for part, layer in LAYER.items() if layer == 0},
    "report": {"plan", "laws", "study"} | {part for part, layer in LAYER.items() if layer == 0},
}
# maximum number of files that import a library; pyarrow: reading text and tasks, writing a table, mixtures;
# datasets: streaming C4, exporting a mixture; lm_eval: its model, its tasks, its files, a bench
HEAVY = {
    "deepspeed": 1, "duckdb": 1, "lm_eval": 4, "plotly": 2, "wandb": 1, "datasets": 2, "tensorboard": 1,
    "jinja2": 1, "kaleido": 1, "pyarrow": 5, "pyarrow.flight": 1, "rich": 1,
}  # fmt: skip
WITHOUT_TORCH = (
    "text", "data", "tokenizer", "plan", *SIDE, *(part for part, layer in LAYER.items() if layer == 0),
)  # fmt: skip


@cache
def list_imports(path: Path) -> list[tuple[str, bool]]:
    """Return (dotted name, whether it is at module scope) of every import of a file."""
    tree, imports = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not getattr(node, "level", 0), f"{path}: relative import"
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imports += [(f"{prefix}{alias.name}", node in tree.body) for alias in node.names]
    return imports


def find_part(path: Path) -> str:
    """Return the folder or module directly in megatron/ that contains a file."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def is_allowed(part: str, other: str) -> bool:
    """Return whether a package may import another."""
    if part in SIDE:
        return other in SIDE[part]
    below = other in LAYER and LAYER[other] < LAYER[part]
    ground = LAYER[part] == 0 and LAYER.get(other) == 0
    return below or ground or (part, other) in ALLOWED_WITHIN_LAYER


def test_a_file_imports_only_lower_layers() -> None:
    bad = []
    for path in FILES:
        part = find_part(path)
        assert part in SIDE or part in LAYER, f"megatron/{part} is missing in LAYER"
        for name, _ in list_imports(path):
            root, *rest = name.split(".")
            ours = root == "megatron" and rest and rest[0] not in ("_csrc", part)
            if root in ("tools", "tests", "utils") or (ours and not is_allowed(part, rest[0])):
                bad.append(f"{path} imports {name}")
    assert bad == []


def test_data_and_studies_do_not_need_torch() -> None:
    paths = [path for path in FILES if find_part(path) in WITHOUT_TORCH]
    assert not [path for path in paths for name, _ in list_imports(path) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("part", ["model", "objective", "optim", "parallel", "engine", "train"])
def test_training_calls_cpp_and_cpu_code_through_kernels_only(part: str) -> None:
    paths = [path for path in FILES if find_part(path) == part]
    details = ("megatron._csrc", "megatron.kernels.cpu_")
    assert paths
    assert not [p for p in paths for name, _ in list_imports(p) if name.startswith(details)]


@pytest.mark.parametrize("library", HEAVY)
def test_a_heavy_library_is_imported_in_one_place_and_only_when_used(library: str) -> None:
    importers = [
        (path, top)
        for path in [*FILES, *sorted((ROOT / "tools").rglob("*.py"))]
        for name, top in list_imports(path)
        if f"{name}.".startswith(f"{library}.")
    ]
    assert len({path for path, _ in importers}) <= HEAVY[library], importers
    assert not [path for path, top in importers if top], f"{library} is imported at module scope"


def test_laws_load_only_numpy_scipy_and_the_ground() -> None:
    modules = [f"megatron.laws.{path.stem}" for path in sorted(PACKAGE.glob("laws/[a-z]*.py"))]
    code = f"import sys, {', '.join(['megatron.laws', *modules])}; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in names if name.startswith("megatron.") and not name.startswith("megatron.laws")}
    assert ours <= {"megatron.io", "megatron.log"}
    assert not {"torch", "pandas", "pyarrow", "yaml", "omegaconf", "pydantic"} & set(names)


def test_there_is_no_import_cycle() -> None:
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in FILES}
    names = {".".join(parts[path]).removesuffix(".__init__"): path for path in FILES}
    edges = {}
    for module, path in names.items():
        imported = {target for name, _ in list_imports(path) for target in (name, name.rpartition(".")[0])}
        edges[module] = imported & names.keys() - {module}
    TopologicalSorter(edges).prepare()  # raises CycleError with the modules of a cycle


def test_every_imported_package_is_required_by_the_base_or_by_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"base": project["dependencies"], **project["optional-dependencies"]}
    lines = [f'{package}; extra == "{extra}"' for extra in extras for package in extras[extra]]
    files = [*FILES, *(ROOT / "tools").glob("*.py")]
    names = {name.split(".")[0] for file in files for name, _ in list_imports(file)}
    lacking = {name for name in names - sys.stdlib_module_names if not find_extra(name, lines)}
    # built by hand; torchtitan comes with a trainer of its own, choreographer with kaleido
    assert lacking == {"megatron", "apex", "torchao", "torchtitan", "choreographer"}
