"""Run a reduced form of every CPU bench, to show that each still works; the figures mean nothing.

    python tools/bench/smoke.py
    python tools/bench/smoke.py --benches fit order

One bench runs after another, each on one thread. Benches that read data which is missing (SCALING_DATA,
SCALING_LAWS) are skipped with a reason. The exit status is 1 if a bench failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness import ROOT

from megatron.cli import create_parser, run_main

# Name of a bench -> its arguments in the reduced form. {inputs} is a folder with text and a tokenizer, {data}
# and {laws} are SCALING_DATA and SCALING_LAWS.
REDUCED = {
    "preprocess": "{inputs}/text/train.jsonl --tokenizer-model {inputs}/tokenizer --sides batch --repeat 1",
    "loader": "--workers 0 2 --batches 20 --repeat 1",
    "order": "--documents 200000 --tokens 100000000 --epochs 1 --repeat 1",
    "train": "--dtype float32 --widths 16 --repeat 1 --steps 2 --threads 1",
    "fit": "--starts 10 --repeat 2 --forms=",
    "mixture": "--documents 2e4 --repeat 1 --files 20",
    "generate": "--size 7M --batch 1 --new-tokens 8 --repeat 1 --threads 1",
    "downstream": "--include-path {inputs}/tasks --tasks hellaswag --limit 4 --repeat 1 --threads 1",
    "coordinate_check": "--widths 32 64 --depths 2 4 --steps 2 --seeds 1 --out {inputs}/page.html",
    "coverage": "--designs 20 --simulations 2 --n-bootstrap 20",
    "extrapolate": "--sets 240 --n-bootstrap 20",
    "gpu": "--device cpu --sizes tiny --only ours/tiny/AR/default --steps 1 --out {inputs}/gpu",
}
REQUIRED = {"downstream": "{data}/downstream", "extrapolate": "{laws}"}
TASKS = "tests/task_folder.py {data}/downstream {inputs}/tasks"
INPUTS = (  # commands that make the text and its tokenizer
    "tools/prepare_corpus.py --corpus local --max-mb 4 --out {inputs}/text",
    "tools/train_tokenizer.py {inputs}/text/train.jsonl --n-tokens 512 --out {inputs}/tokenizer",
)
LIMIT_S = 300


def run_command(line: str) -> str:
    """Run a program of this checkout; return its last line of output if it failed, otherwise nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *line.split()],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return (done.stdout.strip().splitlines() or ["no output"])[-1] if done.returncode else ""


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    names = list(REDUCED)
    parser.add_argument("--benches", nargs="+", choices=names, default=names, help="default: all")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the reduced benches, and print a line for each."""
    args = build_parser().parse_args(argv)
    shared = ROOT.parent / "shared"
    failed = 0
    with tempfile.TemporaryDirectory() as inputs:
        folders = {"inputs": inputs, "data": os.environ.get("SCALING_DATA", str(shared / "data"))}
        folders["laws"] = os.environ.setdefault("SCALING_LAWS", str(shared / "laws"))
        if "preprocess" in args.benches:
            for line in INPUTS:
                if error := run_command(line.format(**folders)):
                    raise OSError(f"{line}: {error}")
        has_data = "downstream" in args.benches and Path(folders["data"]).is_dir()
        if has_data and (error := run_command(TASKS.format(**folders))):
            raise OSError(f"{TASKS}: {error}")
        for name in args.benches:
            folder = Path(REQUIRED.get(name, "{inputs}").format(**folders))
            if not folder.is_dir():
                print(f"{name:18} skipped: {folder}: no such folder")
                continue
            began = time.monotonic()
            error = run_command(f"tools/bench/{name}.py {REDUCED[name].format(**folders)}")
            failed += bool(error)
            print(f"{name:18}{time.monotonic() - began:6.1f} s  {error or 'done'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    run_main(main)
