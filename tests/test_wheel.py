"""Contents of the wheel, and an installation for laws alone, without torch."""

import json
import os
import re
import shutil
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import run_process

# the helper takes a minute to compile
STUB = "#include <pybind11/pybind11.h>\nPYBIND11_MODULE(_csrc, m) {}\n"
SIZES = """
import megatron.report.report, megatron.study.table
from megatron.config.presets import load_model_sizes
print(load_model_sizes()["7M"]["d_model"])
"""


def run(*words: str | Path, folder: Path, **variables: str) -> str:
    """Run a command outside the checkout and return its output."""
    base = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = run_process(words, folder, base, **variables)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, with an empty C++ helper."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = run(
        "git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=folder
    )
    for name in filter(None, listed.split("\0")):
        if name.startswith((".venv", "csrc/")) or not (root / name).is_file():
            continue
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / "source" / name, follow_symlinks=False)
    (folder / "source" / "csrc").mkdir()
    for name, text in {"kernels": "", "tokenizer": "", "module": STUB}.items():
        (folder / "source" / "csrc" / f"{name}.cpp").write_text(text)
    run(sys.executable, "-m", "pip", "wheel", "./source", "--no-deps", "--no-build-isolation", folder=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel_without_helper(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a machine without a compiler builds."""
    folder, source = tmp_path_factory.mktemp("no_compiler"), wheel.parent / "source"
    shutil.rmtree(source / "build")
    words = ("-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation")
    run(sys.executable, *words, folder=folder, CC="/bin/false", CXX="/bin/false")
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_has_the_package_with_its_data_and_nothing_else(wheel: Path, root: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert "megatron" in tops and not tops & {"tests", "tools", "utils", "csrc", "examples_scaling"}
    sources = {str(path.relative_to(root)) for path in (root / "megatron").rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name and not name.endswith(".so")}
    assert sources <= set(names)
    assert any(re.fullmatch(r"megatron/_csrc\..*\.so", name) for name in names)
    # the Slurm launcher submits the first script, which sources the second
    assert {f"megatron/commands/{name}.sh" for name in ("sweep_slurm", "requeue")} <= set(names)
    sizes = zipfile.ZipFile(wheel).read("megatron/config/model_sizes.yaml")
    assert sizes == (root / "utils" / "model_sizes.yaml").read_bytes()


@pytest.mark.slow
def test_an_editable_install_is_a_search_path_beside_megatron_core(wheel: Path, tmp_path: Path) -> None:
    source = wheel.parent / "source"
    code = f"import setuptools.build_meta as build; build.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", code, folder=source)
    (built,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(built)
    (name,) = (name for name in archive.namelist() if "/" not in name)  # no import hook beside it
    assert name.endswith(".pth") and archive.read(name).decode().strip() == str(source)


def test_every_pin_of_development_is_within_the_bounds_of_an_extra(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    bounds = {entry.name.lower(): entry for entry in map(Requirement, texts)}
    text = (root / "requirements.txt").read_text()
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    base = [*project["dependencies"], *project["optional-dependencies"]["laws"]]
    assert "torch" not in {Requirement(text).name for text in base}  # laws are installed without it
    (torch,) = map(Requirement, re.findall(r"^torch[<>=][^\s#]+", text, re.MULTILINE))
    assert len(pins) > 20 and torch.specifier == bounds["torch"].specifier
    for name, version in pins:
        assert name.lower() in bounds, f"{name}: in requirements.txt, but in no extra of pyproject.toml"
        assert bounds[name.lower()].specifier.contains(version), f"{bounds[name.lower()]} refuses {version}"


@pytest.mark.slow
def test_without_a_compiler_only_a_wheel_is_built(wheel_without_helper: Path, wheel: Path) -> None:
    assert not [name for name in zipfile.ZipFile(wheel_without_helper).namelist() if name.endswith(".so")]
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    assert run_process(build, wheel.parent / "source", CC="/bin/false", CXX="/bin/false").returncode == 1


@pytest.mark.slow
def test_laws_install_and_fit_without_torch_and_compiler(wheel_without_helper: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    rows = [(N, D, 1.8 + 480 / N**0.35 + 2000 / D**0.36) for N in (1e7, 1e8, 1e9) for D in (2e8, 2e9, 2e10)]
    lines = ["n_params,train_tokens,loss", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    fit = [tmp_path / "fresh" / "bin" / "scaling", "fit", "table.csv", "--out", "law.json"]
    base = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for extra in ("", "[laws]"):
        install = [python, "-m", "pip", "install", "--quiet", f"{wheel_without_helper}{extra}"]
        installed = run_process(install, base=base)
        if "No matching distribution found for numpy" in installed.stderr:
            pytest.skip("no package index")
        assert installed.returncode == 0, installed.stderr
        if not extra:
            done = run_process(fit, tmp_path, {})
            sentence = "error: yaml: not installed. This needs pip install 'megatron-scaling[laws]'.\n"
            assert (done.returncode, done.stderr) == (1, sentence)
    run(*fit, folder=tmp_path)
    assert json.loads((tmp_path / "law.json").read_text())["params"]["alpha"] == pytest.approx(0.35, abs=1e-3)
    assert "torch" not in run(python, "-m", "pip", "list", folder=tmp_path).split()
    assert run(python, "-c", SIZES, folder=tmp_path) == "128\n"
