"""Run a reduced form of every CPU bench, in at most two minutes on two cores, and store the results.

    python tools/bench/smoke.py
    python tools/bench/smoke.py --benches fit order --history build/bench/history.jsonl

One bench runs after another, each on one thread. Benches that read data which is missing (SCALING_DATA,
SCALING_LAWS) are skipped with a reason. After the time limit the rest is not run, and the running bench is
stopped. The figures are for comparison with an earlier commit on the same machine (compare.py); those of
benchmarks.md are larger runs. The exit status is 1 if a bench failed, or if there is no result at all.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from history import ROOT, add_history_options, read_history

from megatron.cli import create_parser, install_stop_handlers, positive_int, run_main

BENCHES = ROOT / "tools" / "bench"
# Name of a bench -> its arguments in the reduced form, first the benches with many results in little time.
# {inputs} is a folder with text and a tokenizer, {data} and {laws} are SCALING_DATA and SCALING_LAWS.
REDUCED = {
    "small_models": "--widths 32 96 --steps 20",
    "preprocess": "{inputs}/text/train.jsonl --tokenizer-model {inputs}/tokenizer --sides batch --repeat 5",
    "loader": "--workers 0 2 --batches 50 --repeat 3",
    "parts": "--parts 64 --documents 2e5 --repeat 3",
    "order": "--documents 200000 --tokens 100000000 --epochs 1 10 --repeat 3",
    "train": "--dtype float32 --rounds 3 --steps 1 --batch 1 --threads 1",
    "fit": "--starts 10 --repeat 5 --repeat-forms 2 --forms=",
    "mixture": "--documents 2e4 --repeat 3 --files 20",
    "generate": "--size 7M --batch 1 --new-tokens 16 --repeat 3 --threads 1",
    "downstream": "--data-dir {data}/downstream --tasks hellaswag --limit 8 --repeat 2 --threads 1",
    "coordinate_check": "--widths 32 64 --depths 2 4 --steps 2 --seeds 1 --out {inputs}/page.html",
    "coverage": "--designs 20 --simulations 4 --n-bootstrap 20",
    "extrapolate": "--sets 240 --n-bootstrap 20",
    "fuzz": "--inputs 60 --only jsonl law.json tables",
    "kills": "--kills 1 --only preprocess-1",
}
INPUTS = (  # commands that make the text and its tokenizer
    "prepare_corpus.py --corpus stdlib --max-mb 4 --out {inputs}/text",
    "train_tokenizer.py {inputs}/text/train.jsonl --n-tokens 512 --out {inputs}/tokenizer",
)


@dataclass(frozen=True)
class Outcome:
    """Seconds of a bench; `error` is empty after success, `skipped` after a missing input."""

    seconds: float
    error: str = ""
    skipped: str = ""


def find_folders(inputs: Path) -> dict[str, str]:
    """Return the folders that the arguments of REDUCED name."""
    shared = ROOT.parent / "shared"
    data = os.environ.get("SCALING_DATA", str(shared / "data"))
    laws = os.environ.get("SCALING_LAWS", str(shared / "laws"))
    return {"inputs": str(inputs), "data": data, "laws": laws}


def prepare_inputs(inputs: Path) -> None:
    """Write the text and the tokenizer into a folder. Raise OSError if a command fails."""
    for line in INPUTS:
        tool, *words = line.format(inputs=inputs).split()
        command = [sys.executable, str(ROOT / "tools" / tool), *words]
        outcome = run_limited(command, ROOT, {}, 300)
        if outcome.error:
            raise OSError(f"{tool}: {outcome.error}")


def run_limited(command: Sequence[str], cwd: Path, environment: dict[str, str], limit_s: float) -> Outcome:
    """Run a command, and stop it with all its children at the limit."""
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            # a group of its own: the benches start other processes
            start_new_session=True,
        )
        try:
            process.wait(timeout=max(limit_s, 0.1))
        except subprocess.TimeoutExpired:
            return Outcome(time.monotonic() - begin, skipped="stopped at the time limit")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - begin
        output.seek(0)
        lines = output.read().strip().splitlines() or ["no output"]
    return Outcome(seconds, f"exit status {process.returncode}: {lines[-1]}" if process.returncode else "")


def run_bench(
    name: str,
    folders: dict[str, str],
    history: Path,
    checkout: Path,
    environment: dict[str, str],
    limit_s: float,
) -> Outcome:
    """Run the reduced form of one bench with the code of a checkout."""
    if name == "downstream" and not Path(folders["data"], "downstream").is_dir():
        return Outcome(0.0, skipped=f"{folders['data']}: no downstream tasks; set SCALING_DATA")
    if name == "extrapolate" and not Path(folders["laws"]).is_dir():
        return Outcome(0.0, skipped=f"{folders['laws']}: no published runs; set SCALING_LAWS")
    words = REDUCED[name].format(**folders).split()
    command = [sys.executable, str(checkout / "tools" / "bench" / f"{name}.py"), *words]
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(checkout),
        "SCALING_LAWS": folders["laws"],
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    return run_limited([*command, "--history", str(history)], checkout, settings, limit_s)


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("benches").add_argument
    add(
        "--benches",
        nargs="+",
        choices=list(REDUCED),
        default=list(REDUCED),
        metavar="NAME",
        help=f"{', '.join(REDUCED)}; default: all",
    )
    add("--seconds", type=positive_int, default=120, metavar="S", help="time limit of all benches together")
    add_history_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the reduced benches, and print a line for each."""
    args = build_parser().parse_args(argv)
    end, failed = time.monotonic() + args.seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        history = Path(args.history or Path(folder, "history.jsonl")).resolve()
        before = count_results(history)
        if "preprocess" in args.benches:
            prepare_inputs(Path(folder))
        for name in args.benches:
            left_s = end - time.monotonic()
            outcome = Outcome(0.0, skipped="not run: the time limit has passed")
            if left_s > 0:
                outcome = run_bench(name, find_folders(Path(folder)), history, ROOT, {}, left_s)
            failed += bool(outcome.error)
            print(
                f"{name:18}{outcome.seconds:6.1f} s  {outcome.error or outcome.skipped or 'done'}", flush=True
            )
        n_new = count_results(history) - before
        print(f"{args.history or 'not stored'}: {n_new} new results")
    return int(failed > 0 or n_new == 0)


def count_results(history: Path) -> int:
    """Return the number of results in a history, 0 if it is missing."""
    return sum(1 for _ in read_history(history)) if history.is_file() else 0


if __name__ == "__main__":
    install_stop_handlers()
    run_main(main)
