"""Say in one table what this machine has, what is missing for what, and how to get it.

python tools/check_environment.py
python tools/check_environment.py --quick  # what is installed, without starting torch

Needs nothing but Python: it runs before anything is installed, and where the installation is broken. The exit
status is 1 where training could not run.
"""

from __future__ import annotations  # for the Pythons that are too old, which this must be able to say

import argparse
import importlib.metadata
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
PYTHONS = ((3, 11), (3, 14))  # from the first, before the second
TRAINING = ("torch", "numpy", "omegaconf", "tqdm")  # imported by tools/pretrain.py
WAIT_S = 120  # for a program that is asked; importing torch from a network disk takes its time
ASK_TORCH = """
import json, torch
gpu = torch.cuda.is_available()
print(json.dumps({"n_gpus": torch.cuda.device_count(), "nccl": gpu and torch.version.cuda is not None
    and ".".join(map(str, torch.cuda.nccl.version()))}))
"""
INSTALL = "make test, or pip install -r requirements.txt"


@dataclass(frozen=True)
class Row:
    """What was looked for. `found` is empty where it is missing; `how` says then how to get it."""

    what: str
    found: str
    purpose: str = ""
    how: str = ""
    required: bool = False

    @property
    def mark(self) -> str:
        """ok; missing, which is fatal; or -, which is not."""
        return "ok" if self.found else "missing" if self.required else "-"


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    try:
        from megatron.command import command

        parser = command(__doc__)
    except ModuleNotFoundError:  # nothing is installed yet: the same words, plainer
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
    parser.add_argument(
        "--quick", action="store_true", help="only look at what is installed; do not start torch (seconds)"
    )
    return parser


def said(*words: str) -> str:
    """What a program prints, or nothing where there is none, it fails or it hangs."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version(library: str) -> str:
    """The installed version of a library, without importing it; empty where there is none."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> Iterator[Row]:
    """Cores, memory and disk; the interpreter."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Row("machine", f"{platform.system()} {platform.machine()}, {cores} cores for this process")
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        yield Row("memory", gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
    yield Row("disk", f"{gib(shutil.disk_usage(ROOT).free)} free at {ROOT}")
    fits = PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]
    names = [f"{major}.{minor}" for major, minor in PYTHONS]
    yield Row(
        f"Python {names[0]} to <{names[1]}",
        f"{platform.python_version()} at {sys.executable}" if fits else "",
        "everything",
        f"this is {platform.python_version()}: install python3.12, then make PYTHON=python3.12",
        required=True,
    )


def gib(n_bytes: float) -> str:
    """Bytes for people."""
    return f"{n_bytes / 2**30:,.1f} GiB"


def gpus() -> list[str]:
    """'name, memory, driver' of each GPU, from the driver's own tool."""
    told = said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
    found = []
    for line in told.splitlines():
        name, memory, driver = [part.strip() for part in line.rsplit(",", 2)]
        size = gib(float(memory) * 2**20) if memory.replace(".", "").isdigit() else "memory not told"
        found.append(f"{name}, {size}, driver {driver}")
    told = said("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json")
    try:
        cards = json.loads(told) if told else {}
    except ValueError:
        cards = {}
    driver = cards.get("system", {}).get("Driver version", "not told")
    for key in sorted(cards):
        if key.startswith("card"):
            memory = float(cards[key].get("VRAM Total Memory (B)", 0))
            name = cards[key].get("Card series") or cards[key].get("Card Series") or "AMD GPU"
            found.append(f"{name}, {gib(memory)}, driver {driver}")
    return found


def torch_rows(quick: bool) -> Iterator[Row]:
    """torch, what it was built for, the GPUs of the driver, and whether torch sees them."""
    installed, cards = version("torch"), gpus()
    built = "the CPU"
    if installed:
        text = (
            Path(importlib.metadata.distribution("torch").locate_file("torch")) / "version.py"
        ).read_text()
        for name, told in (("cuda", "CUDA"), ("hip", "ROCm")):
            if found := re.search(rf"^{name}[^=\n]*= '([^']+)'", text, re.MULTILINE):
                built = f"{told} {found[1]}"
    asked, error = {}, ""
    if installed and not quick:
        asked, error = ask_torch()
    yield Row("torch", "" if error else installed and f"{installed}, built for {built}", "training, scoring",
              error or INSTALL, required=True)  # fmt: skip
    for i, card in enumerate(cards):
        yield Row(f"GPU {i}", card)
    if not cards:
        yield Row(
            "GPU", "", "speed; everything also runs on CPUs", "its driver: nvidia-smi and rocm-smi find none"
        )
    elif not quick and not error and installed:
        n_seen = asked.get("n_gpus", 0)
        yield Row(
            "GPUs that torch sees", f"{n_seen} of {len(cards)}" if n_seen else "", "training on GPUs",
            "install a torch for your driver: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu130 (or cu126, rocm7.2)",
        )  # fmt: skip
        nccl = asked.get("nccl")
        yield Row("NCCL", str(nccl) if nccl else "", "several NVIDIA GPUs", "a torch for CUDA brings it")


def ask_torch() -> tuple[dict, str]:
    """(what torch says about this machine, the error where it does not start)."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"installed, but import torch takes more than {WAIT_S} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        return {}, f"installed, but does not start ({last}): reinstall it"
    return json.loads(done.stdout.splitlines()[-1]), ""


def own_rows() -> Iterator[Row]:
    """megatron itself, its C++ helper, and what builds that."""
    helper = ""
    try:
        from megatron import _csrc

        helper = str(_csrc.__file__)
        how = ""
    except ImportError as error:
        how = f"pip install --no-build-isolation --no-deps -e . ({error})"
    yield Row("megatron._csrc", helper, "data for training", how, required=True)
    compiler = said("g++", "--version").partition("\n")[0]
    yield Row("g++", compiler, "building megatron._csrc (C++20: 10 or newer)", "apt-get install g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    yield Row(
        "Python's C headers", str(headers.parent) if headers.is_file() else "", "building megatron._csrc",
        "apt-get install python3-dev",
    )  # fmt: skip


def library_rows() -> Iterator[Row]:
    """Each pinned line of requirements.txt, beside what is installed."""
    pins = re.findall(
        r"^([\w.-]+)==(\S+)\s*(?:# (.*))?$", (ROOT / "requirements.txt").read_text(), re.MULTILINE
    )
    for library, pinned, purpose in pins:
        if library == "torch":
            continue
        installed = version(library)
        told = installed if installed in ("", pinned) else f"{installed} (pinned: {pinned})"
        yield Row(
            library, told, purpose or "building megatron._csrc, tests", f"pip install {library}=={pinned}",
            library in TRAINING,
        )  # fmt: skip


def optional_rows() -> Iterator[Row]:
    """What single options and scripts use."""
    compiler = said("nvcc", "--version").splitlines() or said("hipcc", "--version").splitlines()
    yield Row("nvcc or hipcc", compiler[-1] if compiler else "", "building apex; DeepSpeed's own kernels",
              "the cluster's module of CUDA or ROCm")  # fmt: skip
    yield Row("apex", apex(), "optim.kernel: apex", "build it from https://github.com/NVIDIA/apex "
              "(the apex of PyPI is another project)")  # fmt: skip
    yield Row("torchao", version("torchao"), "dist.float8: true", "pip install torchao")
    slurm = said("sbatch", "--version")
    way = (
        "a slurm.conf: sbatch is here, and finds none"
        if shutil.which("sbatch")
        else "the cluster's login node has it"
    )
    yield Row("Slurm", slurm, "train_slurm.sh, sweep.py --launcher slurm", way)
    mpi = said("mpirun", "--version").partition("\n")[0]
    yield Row("MPI", mpi, "train_mpi.sh", "apt-get install openmpi-bin, or the cluster's module")
    browsers = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((path for path in map(shutil.which, browsers) if path), "")
    yield Row("chromium", browser, "make_report.py --figures", "apt-get install chromium")
    data = Path(os.environ.get("SCALING_DATA", ROOT.parent / "shared" / "data"))
    yield Row("SCALING_DATA", str(data) if data.is_dir() else "", "tests on real text",
              "a folder with c4/, gpt2_tokenizer/, ...; such tests are skipped without it")  # fmt: skip


def apex() -> str:
    """NVIDIA's apex: PyPI's of the same name has no optimizers."""
    for folder in map(Path, sys.path):
        if (folder / "apex" / "optimizers" / "fused_adam.py").is_file():
            return version("apex") or str(folder / "apex")
    return ""


def rows(quick: bool) -> Iterator[Row]:
    """Everything, in the order in which it is needed."""
    yield from machine()
    yield from torch_rows(quick)
    yield from own_rows()
    yield from library_rows()
    yield from optional_rows()


def main(argv: Sequence[str] | None = None) -> int:
    """Print each line as soon as it is known, and then what to do first."""
    args = build_parser().parse_args(argv)
    lacking = []
    for row in rows(args.quick):
        told = row.found or f"for {row.purpose}; to get it: {row.how}"
        print(f"{row.mark:<8}{row.what:<21} {told}", flush=True)
        if row.required and not row.found:
            lacking.append(row.what)
    if lacking:
        print(f"error: training cannot run here without {', '.join(lacking)}", file=sys.stderr)
        return 1
    print("training can run here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
