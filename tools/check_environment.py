"""List in one table what is installed here, what is missing for which purpose, and how to install it.

python tools/check_environment.py

It requires only Python, so it also runs before the installation and when the installation is broken. The exit
status is 1 if training cannot run.
"""

from __future__ import annotations  # old Pythons must be able to run this and report their version

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ((3, 11), (3, 14))  # first supported version, first unsupported one
TRAINING = ("torch", "numpy", "omegaconf")  # imported by tools/pretrain.py
WAIT_S = 120  # for one external program; importing torch from a network disk is slow
# Runs in a separate process: an import of torch with a missing library may crash, and it takes seconds.
TORCH_QUERY = """
import torch
n = torch.cuda.device_count()
built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
print("built for", built if torch.version.cuda or torch.version.hip else "the CPU", "and sees", n, "GPUs")
"""
GPUS = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
CUDA_INDEX = "https://download.pytorch.org/whl/cu130 (or cu126, rocm7.2)"
PROGRAMS = (  # words, purpose, how to install it
    (("nvcc", "--version"), "building apex and DeepSpeed's kernels", "load the cluster's CUDA module"),
    (("sbatch", "--version"), "train_slurm.sh, sweep.py --launcher slurm", "use a cluster's login node"),
    (("mpirun", "--version"), "train_mpi.sh", "apt-get install openmpi-bin, or the cluster's module"),
    (("chromium", "--version"), "make_report.py --figures", "apt-get install chromium"),
)


class Row(NamedTuple):
    """One line of the table: an empty value is missing; `required` by training."""

    item: str
    value: str
    purpose: str = ""
    fix: str = ""
    required: bool = False


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    try:
        from megatron.cli import create_parser
    except ModuleNotFoundError:  # nothing is installed yet: without the shared layout of the help
        return argparse.ArgumentParser(description=__doc__)
    return create_parser(__doc__, removed={"--quick": "torch is always imported, to list its GPUs"})


def run_command(*words: str) -> tuple[str, str]:
    """Return (standard output, "") of a program, or ("", the last line of its error)."""
    if shutil.which(words[0]) is None:
        return "", f"no program {words[0]}"
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or ["no error message"])[-1]
    return done.stdout.strip(), ""


def installed_version(library: str) -> str:
    """Return the installed version of a library without importing it; '' if it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine_rows() -> Iterator[Row]:
    """Yield rows for the machine and the Python interpreter."""
    # the cores that taskset, Slurm or a container allows, which may be fewer than the machine has
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    disk = f"{shutil.disk_usage(ROOT).free / 2**30:,.1f} GiB free at {ROOT}"
    yield Row("machine", f"{platform.system()} {platform.machine()}, {cores} cores for this process, {disk}")
    fits = PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]
    low, high = (f"{major}.{minor}" for major, minor in PYTHONS)
    value = f"{platform.python_version()} at {sys.executable}" if fits else ""
    fix = f"this is {platform.python_version()}: install python3.12, then make PYTHON=python3.12"
    yield Row(f"Python {low} to <{high}", value, "everything", fix, required=True)


def torch_rows() -> Iterator[Row]:
    """Yield rows for torch, its build (CPU, CUDA or ROCm), and the GPUs of the driver and of torch."""
    version, report, error = installed_version("torch"), "", ""
    if version:
        report, error = run_command(sys.executable, "-c", TORCH_QUERY)
        # the last line, since libraries may print to standard output during the import
        report = report.rpartition("\n")[2]
    fix = f"reinstall it: import torch fails ({error})" if error else "make test"
    value = "" if error else ", ".join(filter(None, (version, report)))
    yield Row("torch", value, "training, scoring", fix, required=True)
    cards = run_command(*GPUS)[0].splitlines()
    for i, card in enumerate(cards):
        yield Row(f"GPU {i}", card)
    if report.endswith("sees 0 GPUs"):
        fix = f"pip install torch --index-url {CUDA_INDEX}" if cards else "install its driver"
        yield Row("GPUs of torch", "", "speed; everything also runs on CPUs", fix)


def extension_rows() -> Iterator[Row]:
    """Yield rows for the C++ extension of megatron, and for what compiles it."""
    helper, fix = "", ""
    try:
        from megatron import _csrc

        helper = str(_csrc.__file__)
    except ImportError as error:
        is_ours = error.name == "megatron._csrc"
        fix = str(error) if is_ours else f"pip install --no-build-isolation --no-deps -e . ({error})"
    yield Row("megatron._csrc", helper, "data for training", fix, required=True)


def read_requirements() -> list[tuple[str, str, str]]:
    """Return (library, pinned version, purpose) of the requirements; without a checkout, for training."""
    path = ROOT / "requirements.txt"
    text = path.read_text() if path.is_file() else ""
    # "numpy==2.4.6  # arrays" -> ("numpy", "2.4.6", "arrays")
    rows = re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)\s*(?:# (.*))?$", text, re.MULTILINE)
    return rows or [(library, "", "training") for library in TRAINING]


def library_rows(libraries: Sequence[tuple[str, str, str]]) -> Iterator[Row]:
    """Yield a row for each library, with the installed version."""
    for library, pinned, purpose in libraries:
        value = installed_version(library)
        if value and pinned not in ("", value):
            value += f" (pinned: {pinned})"
        fix = f"pip install {library}" + (f"=={pinned}" if pinned else "")
        yield Row(library, value, purpose or "building megatron._csrc, tests", fix, library in TRAINING)
    fix = "clone https://github.com/NVIDIA/apex and build it with amp_C as in INSTALL.md; PyPI's is another"
    # its compiled kernels: a package on PyPI of the same name has none
    kernels = importlib.util.find_spec("amp_C")
    yield Row("apex", str(kernels.origin) if kernels else "", "optim.kernel: apex", fix)
    yield Row("torchao", installed_version("torchao"), "dist.float8: true", "pip install torchao")


def list_rows() -> Iterator[Row]:
    """Yield all rows, in the order of installation."""
    yield from machine_rows()
    libraries = read_requirements()
    if not any(map(installed_version, TRAINING)):
        yield Row("packages", "", "everything", "make quickstart, or make test", required=True)
        return
    yield from torch_rows()
    yield from extension_rows()
    yield from library_rows([row for row in libraries if row[0] != "torch"])
    for words, purpose, fix in PROGRAMS:
        output, error = run_command(*words)
        yield Row(words[0], output.partition("\n")[0], purpose, f"{fix} ({error})")


def main(argv: Sequence[str] | None = None) -> int:
    """Print each row as soon as it is available, then whether training can run."""
    build_parser().parse_args(argv)
    lacking = []
    for row in list_rows():
        mark = "ok" if row.value else "missing" if row.required else "-"
        # aligned here, not by rich, which may be missing; and a row is shown at once
        print(
            f"{mark:<8}{row.item:<21} {row.value or f'for {row.purpose}; to install: {row.fix}'}", flush=True
        )
        if row.required and not row.value:
            lacking.append(row.item)
    if lacking:
        print(f"error: training cannot run here without {', '.join(lacking)}", file=sys.stderr)
        return 1
    print("training can run here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
