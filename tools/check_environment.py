"""List in one table what is installed here, what is missing for which purpose, and how to install it.

python tools/check_environment.py
python tools/check_environment.py --quick  # what is installed, without starting torch

It requires only Python, so it also runs before the installation and when the installation is broken. The exit
status is 1 if training cannot run.
"""

from __future__ import annotations  # old Pythons must be able to run this and report their version

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "megatron-scaling"
PYTHONS = ((3, 11), (3, 14))  # first supported version, first unsupported one
TRAINING = ("torch", "numpy", "omegaconf")  # imported by tools/pretrain.py
WAIT_S = 120  # for one external program; importing torch from a network disk is slow
# Runs in a separate process: an import of torch with a missing library may crash, and it takes seconds. A
# torch for ROCm has no torch.version.cuda.
TORCH_QUERY = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({"n_gpus": torch.cuda.device_count(), "nccl": gpu and torch.version.cuda is not None
    and ".".join(map(str, torch.cuda.nccl.version()))}))
"""
INSTALL = "make test, or pip install -r requirements.txt"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    item      program, library or device
    value     its version or path; empty if it is missing
    purpose   feature that requires it
    fix       how to install it
    required  whether training requires it
    """

    item: str
    value: str
    purpose: str = ""
    fix: str = ""
    required: bool = False

    @property
    def mark(self) -> str:
        """Return 'ok', 'missing' (required and absent) or '-' (optional and absent)."""
        return "ok" if self.value else "missing" if self.required else "-"


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    try:
        from megatron.cli import create_parser

        parser = create_parser(__doc__)
    except ModuleNotFoundError:  # nothing is installed yet: the same options without the shared help layout
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
    parser.add_argument(
        "--quick", action="store_true", help="only list what is installed, without importing torch (seconds)"
    )
    return parser


def run_command(*words: str) -> str:
    """Return the standard output of a program; '' if it is missing, fails or exceeds WAIT_S."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def installed_version(library: str) -> str:
    """Return the installed version of a library without importing it; '' if it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine_rows() -> Iterator[Row]:
    """Yield rows for cores, memory, disk and the Python interpreter."""
    # the cores that taskset, Slurm or a container allows, which may be fewer than those of the machine
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Row("machine", f"{platform.system()} {platform.machine()}, {cores} cores for this process")
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield Row("memory", format_gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    yield Row("disk", f"{format_gib(shutil.disk_usage(ROOT).free)} free at {ROOT}")
    fits = PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]
    names = [f"{major}.{minor}" for major, minor in PYTHONS]
    yield Row(
        f"Python {names[0]} to <{names[1]}",
        f"{platform.python_version()} at {sys.executable}" if fits else "",
        "everything",
        f"this is {platform.python_version()}: install python3.12, then make PYTHON=python3.12",
        required=True,
    )


def format_gib(n_bytes: float) -> str:
    """Format a size in bytes as GiB."""
    return f"{n_bytes / 2**30:,.1f} GiB"


def list_gpus() -> list[str]:
    """Return 'name, memory, driver' for each GPU, as reported by nvidia-smi and rocm-smi."""
    output = run_command(
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"
    )
    gpus = []
    for line in output.splitlines():
        # from the right: a name may contain a comma. nvidia-smi reports memory in MiB.
        name, memory, driver = [part.strip() for part in line.rsplit(",", 2)]
        size = (
            format_gib(float(memory) * 2**20) if memory.replace(".", "").isdigit() else "memory not reported"
        )
        gpus.append(f"{name}, {size}, driver {driver}")
    output = run_command(
        "rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json"
    )
    try:
        cards = json.loads(output) if output else {}
    except ValueError:
        cards = {}
    driver = cards.get("system", {}).get("Driver version", "not reported")
    for key in sorted(cards):
        if key.startswith("card"):
            memory = float(cards[key].get("VRAM Total Memory (B)", 0))
            name = cards[key].get("Card series") or cards[key].get("Card Series") or "AMD GPU"
            gpus.append(f"{name}, {format_gib(memory)}, driver {driver}")
    return gpus


def torch_rows(quick: bool) -> Iterator[Row]:
    """Yield rows for torch, its build (CPU, CUDA or ROCm), the driver's GPUs, and the GPUs of torch."""
    installed, cards = installed_version("torch"), list_gpus()
    built = "the CPU"
    if installed:
        # version.py is read as text, because an import takes seconds and may fail: cuda: Optional[str] =
        # '13.0'. A build for the CPU has None, which the pattern with quotes does not match.
        text = (
            Path(importlib.metadata.distribution("torch").locate_file("torch")) / "version.py"
        ).read_text()
        for name, label in (("cuda", "CUDA"), ("hip", "ROCm")):
            if match := re.search(rf"^{name}[^=\n]*= '([^']+)'", text, re.MULTILINE):
                built = f"{label} {match[1]}"
    report, error = {}, ""
    if installed and not quick:
        report, error = query_torch()
    yield Row("torch", "" if error else installed and f"{installed}, built for {built}", "training, scoring",
              error or INSTALL, required=True)  # fmt: skip
    for i, card in enumerate(cards):
        yield Row(f"GPU {i}", card)
    if not cards:
        yield Row(
            "GPU",
            "",
            "speed; everything also runs on CPUs",
            "install its driver: nvidia-smi and rocm-smi list no GPU",
        )
    elif not quick and not error and installed:
        n_seen = report.get("n_gpus", 0)
        yield Row(
            "GPUs that torch sees", f"{n_seen} of {len(cards)}" if n_seen else "", "training on GPUs",
            "install a torch for your driver: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu130 (or cu126, rocm7.2)",
        )  # fmt: skip
        nccl = report.get("nccl")
        yield Row(
            "NCCL", str(nccl) if nccl else "", "several NVIDIA GPUs", "installed with a CUDA build of torch"
        )


def query_torch() -> tuple[dict, str]:
    """Return (torch's report of GPUs and NCCL, '') or ({}, error) if torch cannot be imported."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_QUERY], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"installed, but 'import torch' takes more than {WAIT_S} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        return {}, f"installed, but cannot be imported ({last}): reinstall it"
    # the last line, since libraries may print to standard output during the import
    return json.loads(done.stdout.splitlines()[-1]), ""


def package_rows() -> Iterator[Row]:
    """Yield a row for the C++ extension of megatron."""
    helper = ""
    try:
        from megatron import _csrc

        helper = str(_csrc.__file__)
        fix = ""
    except ImportError as error:
        fix = f"pip install --no-build-isolation --no-deps -e . ({error})"
        if error.name == "megatron._csrc":
            fix = str(error)
    yield Row("megatron._csrc", helper, "data for training", fix, required=True)


def compiler_rows() -> Iterator[Row]:
    """Yield rows for what builds the C++ extension."""
    compiler = run_command("g++", "--version").partition("\n")[0]
    yield Row("g++", compiler, "building megatron._csrc (C++20: 10 or newer)", "apt-get install g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    yield Row(
        "Python's C headers", str(headers.parent) if headers.is_file() else "", "building megatron._csrc",
        "apt-get install python3-dev",
    )  # fmt: skip


def read_requirements() -> list[tuple[str, str, str]]:
    """Return (library, pinned version, purpose) of requirements.txt, or without a checkout of the wheel."""
    file = ROOT / "requirements.txt"
    if file.is_file():
        # "numpy==2.4.6  # arrays" -> ("numpy", "2.4.6", "arrays")
        return re.findall(r"^([\w.-]+)==(\S+)\s*(?:# (.*))?$", file.read_text(), re.MULTILINE)
    try:
        # "numpy>=1.26; extra == 'train'" -> "numpy"
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    names = dict.fromkeys(re.split(r"[^\w.-]", line)[0] for line in lines)
    return [(name, "", "an extra of this package") for name in names if name != DISTRIBUTION]


def library_rows() -> Iterator[Row]:
    """Yield a row for each required library, with the installed version."""
    for library, pinned, purpose in read_requirements():
        if library == "torch":
            continue
        installed = installed_version(library)
        value = f"{installed} (pinned: {pinned})" if pinned and installed not in ("", pinned) else installed
        yield Row(
            library, value, purpose or "building megatron._csrc, tests",
            f"pip install {library}=={pinned}" if pinned else f"pip install {library}",
            library in TRAINING,
        )  # fmt: skip


def optional_rows() -> Iterator[Row]:
    """Yield rows for programs and libraries that only some options and scripts require."""
    compiler = run_command("nvcc", "--version").splitlines() or run_command("hipcc", "--version").splitlines()
    yield Row("nvcc or hipcc", compiler[-1] if compiler else "", "building apex and DeepSpeed's kernels",
              "load the cluster's CUDA or ROCm module")  # fmt: skip
    yield Row("apex", find_apex(), "optim.kernel: apex", "build it from https://github.com/NVIDIA/apex with "
              "--cuda_ext, which builds amp_C (INSTALL.md; the apex of PyPI is another project)")  # fmt: skip
    yield Row("torchao", installed_version("torchao"), "dist.float8: true", "pip install torchao")
    slurm = run_command("sbatch", "--version")
    fix = (
        "provide a slurm.conf: sbatch is installed but has no configuration"
        if shutil.which("sbatch")
        else "available on the login node of a cluster"
    )
    yield Row("Slurm", slurm, "train_slurm.sh, sweep.py --launcher slurm", fix)
    mpi = run_command("mpirun", "--version").partition("\n")[0]
    yield Row("MPI", mpi, "train_mpi.sh", "apt-get install openmpi-bin, or the cluster's module")
    browsers = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((path for path in map(shutil.which, browsers) if path), "")
    yield Row("chromium", browser, "make_report.py --figures", "apt-get install chromium")
    data = Path(os.environ.get("SCALING_DATA", ROOT.parent / "shared" / "data"))
    yield Row("SCALING_DATA", str(data) if data.is_dir() else "", "tests on real text",
              "set it to a folder with c4/, gpt2_tokenizer/, ...; otherwise they are skipped")  # fmt: skip


def find_apex() -> str:
    """Return the version or path of NVIDIA's apex with amp_C, its kernels; '' without either.

    The PyPI project of that name has no optimizers.
    """
    has_kernels = importlib.util.find_spec("amp_C") is not None
    for folder in map(Path, sys.path):
        if has_kernels and (folder / "apex" / "optimizers" / "fused_adam.py").is_file():
            return installed_version("apex") or str(folder / "apex")
    return ""


def environment_rows(quick: bool) -> Iterator[Row]:
    """Yield all rows, in the order of installation."""
    yield from machine_rows()
    libraries = [library for library, pinned, _ in read_requirements() if pinned]
    n_missing = sum(not installed_version(library) for library in libraries)
    if n_missing > len(libraries) / 2:  # a new checkout: one command for all, not one for each
        fix = f"make quickstart, or make test ({n_missing} of the {len(libraries)} pinned ones are missing)"
        yield Row("packages", "", "everything", fix, required=True)
        yield from compiler_rows()
        return
    yield from torch_rows(quick)
    yield from package_rows()
    yield from compiler_rows()
    yield from library_rows()
    yield from optional_rows()


def main(argv: Sequence[str] | None = None) -> int:
    """Print each row as soon as it is available, then whether training can run."""
    args = build_parser().parse_args(argv)
    lacking = []
    for row in environment_rows(args.quick):
        detail = row.value or f"for {row.purpose}; to install: {row.fix}"
        # aligned here, not by rich, which may be missing; and a row is shown at once
        print(f"{row.mark:<8}{row.item:<21} {detail}", flush=True)
        if row.required and not row.value:
            lacking.append(row.item)
    if lacking:
        print(f"error: training cannot run here without {', '.join(lacking)}", file=sys.stderr)
        return 1
    print("training can run here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
