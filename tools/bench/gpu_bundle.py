"""Bundle the wheels that the GPU bench needs, for a machine without a network that has torch with CUDA.

    python tools/bench/gpu_bundle.py make build/gpu_bundle        # on a machine with pip's registry
    python3 tools/bench/gpu_bundle.py run build/gpu_bundle -- --out gpu_bench            # on the GPU machine
    python3 tools/bench/gpu_bundle.py run build/gpu_bundle -- --out gpu_bench --parity

`make` downloads wheels for CPython 3.12 on Linux x86_64 and builds those of packages without one. `run`
installs what the machine lacks into BUNDLE/site, builds megatron._csrc in the checkout with the machine's C++
compiler, and runs gpu.py with the arguments after `--`. It imports only Python's standard library.
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
        name, found, version = line.partition("#")[0].strip().partition("==")
        if found:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Make a bundle, or run the bench from it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("action", choices=("make", "run"), help="make the bundle, or run the bench with it")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder of wheels")
    parser.add_argument("words", nargs="*", metavar="ARGUMENT", help="arguments of gpu.py, after --")
    args = parser.parse_args(argv)
    try:
        if args.action == "run":
            return run_bench(args.bundle, args.words)
        make_bundle(args.bundle)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    wheels = sorted(args.bundle.glob("*.whl"))
    megabytes = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    print(f"bundle: {args.bundle}, {len(wheels)} wheels, {megabytes:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
