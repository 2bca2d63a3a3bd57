"""Bundle the wheels that the GPU bench needs, for a machine without a network that has torch with CUDA.

    python tools/bench/gpu_bundle.py make --out build/gpu_bundle        # where pip's registry can be reached
    python3 tools/bench/gpu_bundle.py run --bundle build/gpu_bundle -- --out gpu_bench --no-cells --parity
    python3 tools/bench/gpu_bundle.py run --bundle build/gpu_bundle -- --out gpu_bench --minutes 8

`make` downloads wheels for CPython 3.12 on Linux x86_64 and builds those of packages without one. `run`
installs what the machine lacks into BUNDLE/site, builds megatron._csrc in the checkout with the machine's C++
compiler, and runs gpu.py with the arguments after `--`. Neither needs an installed package but pip.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the package is not installed on the GPU machine
from megatron.cli import create_parser, report_error, run_main  # noqa: E402

PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
# What training imports besides torch, and what builds megatron._csrc. pip's name and the module's.
PACKAGES = {"omegaconf": "omegaconf", "PyYAML": "yaml", "numpy": "numpy", "filelock": "filelock",
            "pybind11": "pybind11", "setuptools": "setuptools"}  # fmt: skip
# only as a source archive, pure Python: built here into a wheel for every platform
SOURCES = {"antlr4-python3-runtime": ("antlr4", "antlr4-python3-runtime==4.9.*")}


def make_bundle(folder: Path) -> None:
    """Download or build one wheel per package."""
    folder.mkdir(parents=True, exist_ok=True)
    pins = read_pins()
    names = [f"{name}=={pins[name.lower()]}" if name.lower() in pins else name for name in PACKAGES]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    target = ["--python-version", PYTHON, "--implementation", "cp", *platforms]
    # torch's own dependencies are there with torch: nothing is resolved
    run_pip("download", "--no-deps", "--only-binary=:all:", *target, "-d", str(folder), *names)
    run_pip("wheel", "--no-deps", "-w", str(folder), *(pin for _, pin in SOURCES.values()))


def read_pins() -> dict[str, str]:
    """Return the versions in requirements.txt by lower-case name."""
    pins = {}
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        name, separator, version = line.partition("#")[0].strip().partition("==")
        if separator:
            pins[name.lower()] = version
    return pins


def run_pip(*words: str) -> None:
    """Run pip of this Python. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    if subprocess.run(command, check=False).returncode:
        raise RuntimeError(f"pip {words[0]} failed; its message is above.")


def install_bundle(bundle: Path, site: Path) -> list[str]:
    """Install the packages that this Python lacks into `site`; return their names."""
    modules = PACKAGES | {name: module for name, (module, _) in SOURCES.items()}
    missing = [name for name, module in modules.items() if not is_installed(name, module)]
    if missing:
        # no index, no dependencies: the machine's own versions of everything else stay
        options = ("--no-index", "--no-deps", "--find-links", str(bundle), "--target", str(site), "--upgrade")
        run_pip("install", "--quiet", *options, *missing)
    return missing


def is_installed(name: str, module: str) -> bool:
    """Return whether a package is there, by its metadata or its module."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return importlib.util.find_spec(module) is not None
    return True


def run_bench(bundle: Path, words: Sequence[str]) -> int:
    """Install, build megatron._csrc and run gpu.py; return its exit status."""
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError(f"{sys.executable}: got no torch, expected one with CUDA. Name its Python.")
    site = (bundle / "site").resolve()
    missing = install_bundle(bundle, site)
    print(f"installed: {', '.join(missing) or 'nothing'}", flush=True)
    # after this Python's own packages: PYTHONPATH precedes them, but `site` has only what they lack
    path = os.pathsep.join([str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    if subprocess.run(build, cwd=ROOT, env=environment, check=False).returncode:
        raise RuntimeError("megatron._csrc: the build failed; it needs g++ with C++20 and Python's headers.")
    bench = [sys.executable, str(ROOT / "tools" / "bench" / "gpu.py"), *words]
    return subprocess.run(bench, env=environment, check=False).returncode


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("action", choices=("make", "run"), help="make the bundle, or run the bench with it")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="make: folder for the wheels")
    parser.add_argument("--bundle", type=Path, metavar="FOLDER", help="run: the folder of `make`")
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments; `words` are those of gpu.py, after `--`."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = build_parser().parse_args(words[:end])
    args.words = words[end + 1 :]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Make a bundle, or run the bench from it."""
    args = parse_args(argv)
    try:
        folder = args.out if args.action == "make" else args.bundle
        if folder is None:
            option = "--out" if args.action == "make" else "--bundle"
            raise ValueError(f"{option}: missing. Name the folder of wheels.")
        if args.action == "run":
            return run_bench(folder, args.words)
        make_bundle(folder)
    except (OSError, RuntimeError, ValueError) as error:
        return report_error(error)
    wheels = sorted(folder.glob("*.whl"))
    megabytes = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"bundle: {folder}, {len(wheels)} wheels, {megabytes:.1f} MB")
    return 0


if __name__ == "__main__":
    run_main(main)
