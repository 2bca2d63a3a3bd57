"""Kill the commands of every subsystem at random moments, restart them, and compare their output files.

    python tools/bench/kills.py --kills 50
    python tools/bench/kills.py --kills 10 --seed 3 --only train-full mixture-server

Each command first runs undisturbed. Then it is killed with SIGKILL, at a random moment of that duration or as
soon as a partially written file appears: all of its processes at once, only the first, or only one child.
After one or two kills the same command is restarted until it ends. It must end with status 0 and leave the
same files as the undisturbed run, byte for byte except for times, memory and the names of checkpoints. Only
kills that hit a running process count.

Phases: start, before anything was written; write, while a file was being written; work, between writes; end,
after the last file was complete. Differences and leftover processes or files are printed, and the exit status
is 1; the folder with logs and files of failed trials is then kept. It uses small models and 1 GB of disk.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from history import add_history_options, record_result

from megatron.cli import create_parser, positive_int, run_main

if TYPE_CHECKING:
    from kill.inputs import Inputs
    from kill.trials import Tally

SERVER = "mixture-server"
QUICK = (
    *(
        "preprocess-1",
        "preprocess-2",
        "merge",
        "write-parts",
        "subset-text",
        "subset-dataset",
        "register",
        "prepare-mixture",
    ),
    *("convert", "frontier", SERVER, "train-full", "train-sharded", "train-diffusion"),
)
SLOW = ("train-2-ranks", "train-deepspeed", "validate", "downstream", "report", "sweep", "two-sweeps")
NAMES = (*QUICK, *SLOW)
PHASES = ("start", "work", "write", "end")
COLUMNS = f"{'subsystem':16} {'kills':>5} {'missed':>6} {' '.join(f'{phase:>5}' for phase in PHASES)}"


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument
    add("--kills", type=positive_int, default=50, metavar="N", help="kills that hit, over all subsystems")
    add("--seed", type=int, default=0, metavar="N", help="seed of the moments")
    add("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="SUBSYSTEM", help=", ".join(NAMES))
    add("--folder", type=Path, metavar="DIR", help="folder of temporary files; default: that of the system")
    add_history_options(parser)
    return parser


def divide_kills(n_kills: int, names: Sequence[str]) -> dict[str, int]:
    """Return the kills of each subsystem: at least 1, and a third as many for slow subsystems."""
    weights = {name: 1 if name in SLOW else 3 for name in names}
    # Each further kill goes to the subsystem with the fewest kills for its weight. For one fast and one slow
    # subsystem and 8 kills: 6 and 2. With fewer kills than subsystems each still gets 1.
    counts = dict.fromkeys(names, 1)
    for _ in range(n_kills - len(names)):
        counts[min(names, key=lambda name: counts[name] / weights[name])] += 1
    return counts


def run_trials(name: str, n_kills: int, seed: int, folder: Path, inputs: "Inputs") -> "Tally":
    """Run all trials of a subsystem. Raise SkippedError if it cannot be started on this machine."""
    from kill.jobs import JOBS
    from kill.server import ServerTrials
    from kill.trials import Trials

    # a seed of text is hashed with SHA-512, so --only does not change the moments of a subsystem
    rng = random.Random(f"{seed} {name}")
    work, logs = folder / name / "work", folder / "logs"
    trials = (
        ServerTrials(inputs, work, rng, logs)
        if name == SERVER
        else Trials(JOBS[name](inputs, work), rng, logs)
    )
    return trials.run(n_kills)


def format_row(tally: "Tally", seconds: float) -> str:
    """Format one line of the table."""
    phases = " ".join(f"{tally.phases[phase]:5}" for phase in PHASES)
    targets = " ".join(f"{target} {n}" for target, n in sorted(tally.targets.items()))
    equal = f"{tally.n_equal}/{tally.n_trials}"
    return (
        f"{tally.name:16} {tally.n_hits:5} {tally.n_missed:6} {phases} {tally.n_restarts:8} {equal:>6} "
        f"{len(tally.leftovers):9} {seconds:5.0f} s  {targets}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials, and print the table and the faults."""
    args = build_parser().parse_args(argv)
    # imported after parsing, so that --help does not load these libraries
    from kill.inputs import Inputs
    from kill.jobs import SkippedError
    from kill.trials import Tally

    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=args.folder))
    (folder / "logs").mkdir()
    inputs = Inputs(folder / "inputs")
    tallies, start = [], time.monotonic()
    print(f"{COLUMNS} restarts  equal leftovers    time  killed")
    for name, n_kills in divide_kills(args.kills, args.only).items():
        began = time.monotonic()
        try:
            tallies.append(run_trials(name, n_kills, args.seed, folder, inputs))
        except SkippedError as error:
            print(f"{name:16} skipped: {error}", flush=True)
            continue
        # the undisturbed run failed: a row with a fault, and the other subsystems follow
        except RuntimeError as error:
            tallies.append(Tally(name, faults=[str(error)]))
        print(format_row(tallies[-1], time.monotonic() - began), flush=True)
        for fault in (*tallies[-1].faults, *tallies[-1].leftovers):
            print(f"  {name}: {fault}", file=sys.stderr, flush=True)
        # the work folder only: the logs and the files of failed trials are in `folder / "logs"`
        shutil.rmtree(folder / name, ignore_errors=True)
    n_hits, n_trials = sum(tally.n_hits for tally in tallies), sum(tally.n_trials for tally in tallies)
    n_equal = sum(tally.n_equal for tally in tallies)
    print(f"{n_hits} kills hit, {n_equal} of {n_trials} outcomes equal, {time.monotonic() - start:.0f} s")
    cell = f"{args.kills} kills of {len(args.only)} subsystems, seed {args.seed}: equal outcomes"
    record_result(args.history, "kills", cell, n_equal / max(1, n_trials), "of 1", better="higher")
    if any(tally.faults or tally.leftovers for tally in tallies):
        print(f"{folder}: logs and files of failed trials", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    run_main(main)
