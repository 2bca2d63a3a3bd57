"""The import order of the tree, read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron"

LAYER = {
    "io": 0, "log": 0, "processes": 0, "run_dir": 0, "command": 0, "config": 0, "early_stop": 0, "keys": 0,
    "revision": 0,
    "tokenizer": 1, "data": 1, "model": 1, "objective": 1, "optim": 1,
    "mixture": 2, "parallel": 2,
    "engine": 3, "checkpoint": 3,
    "evaluation": 4,
    "train": 5,
}  # fmt: skip
WITHIN_A_LAYER = {("data", "tokenizer"), ("config", "config")}
SIDE = "scaling"  # sees layer 0 only
# in how many files a library may be imported, at most; pyarrow: text is read, a table written, mixtures;
# datasets: C4 is streamed, a mixture is given on
HEAVY = {
    "deepspeed": 1, "duckdb": 1, "lm_eval": 1, "plotly": 1, "wandb": 1, "datasets": 2, "tensorboard": 1,
    "pyarrow": 4, "pyarrow.flight": 1,
}  # fmt: skip
WITHOUT_TORCH = (
    "data", "tokenizer", "config", "scaling",
    "io", "log", "processes", "run_dir", "command", "early_stop", "keys", "revision",
)  # fmt: skip


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted name, whether at module scope) of everything a file imports."""
    tree = ast.parse(path.read_text())
    at_top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in at_top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) in at_top


def part_of(path: Path) -> str:
    """Folder or module right under megatron/."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_lies_below_it(path: Path) -> None:
    part = part_of(path)
    assert part == SIDE or part in LAYER, f"megatron/{part} has no place in the order"
    for name, _ in imports(path):
        root, *rest = name.split(".")
        assert root not in ("tools", "tests", "utils"), f"{path} imports {name}"
        if root != "megatron" or not rest or rest[0] in ("_csrc", part):
            continue
        other = rest[0]
        if part == SIDE:
            assert LAYER.get(other) == 0, f"{path}: scaling imports {name}, but sees layer 0 only"
        else:
            allowed = (part, other) in WITHIN_A_LAYER or other != SIDE and LAYER[other] < LAYER[part]
            assert allowed or (LAYER[part] == 0 and LAYER.get(other) == 0), f"{path} imports {name}"


@pytest.mark.parametrize("path", [path for path in FILES if part_of(path) in WITHOUT_TORCH], ids=str)
def test_data_and_scaling_do_not_need_torch(path: Path) -> None:
    assert not [name for name, _ in imports(path) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("library", HEAVY)
def test_a_heavy_library_is_imported_in_one_place_and_only_when_used(library: str) -> None:
    found = [
        (path, top)
        for path in [*FILES, *sorted((ROOT / "tools").rglob("*.py"))]
        for name, top in imports(path)
        if f"{name}.".startswith(f"{library}.")
    ]
    assert len({path for path, _ in found}) <= HEAVY[library], found
    assert not [path for path, top in found if top], f"{library} is imported at module scope"


def test_nobody_imports_tools() -> None:
    for path in sorted(ROOT.joinpath("tests").rglob("*.py")) + FILES:
        assert not [name for name, _ in imports(path) if name.split(".")[0] == "tools"], path


def test_there_is_no_import_cycle() -> None:
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
    }
    edges = {
        module: {
            target
            for name, _ in imports(path)
            for target in (name, name.rpartition(".")[0])
            if target in names and target != module
        }
        for module, path in names.items()
    }
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for target in sorted(edges[module]):
                walk(target, (*trail, module))
            done.add(module)

    for module in names:
        walk(module, ())
