"""Kill the commands of every subsystem at random moments, start them again, and compare what they leave.

    python tools/bench/kills.py --kills 50
    python tools/bench/kills.py --kills 10 --seed 3 --only train-full mixture-server

Each command runs undisturbed first. Then it is killed with SIGKILL at a random moment of the time that this
took, or as soon as a file appears that is being written: all of its processes at once, only the first, or
only one child. After one or two kills the same command is started again, until it ends. It has to end with 0
and to leave the same files as the undisturbed run: byte for byte, except for times, memory and the names of
checkpoints. Only kills that hit a running process count.

Phases: start, before anything was written; write, while something was being written; work, between; end,
after the last file was complete. A difference, a process or a file left over is printed, and the exit status
is 1; the folder with logs and files of failed trials is kept then. Small models, 1 GB of disk.
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

from megatron.command import command, count, run

if TYPE_CHECKING:
    from kill.inputs import Inputs
    from kill.trials import Tally

SERVER = "mixture-server"
QUICK = (
    *(
        "preprocess-1",
        "preprocess-2",
        "merge",
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
    """Command-line words."""
    parser = command(__doc__)
    add = parser.add_argument
    add("--kills", type=count, default=50, metavar="N", help="that hit, over all subsystems")
    add("--seed", type=int, default=0, metavar="N", help="of the moments")
    add("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="SUBSYSTEM", help=", ".join(NAMES))
    add("--folder", type=Path, metavar="DIR", help="where files are for a while; default: the system's")
    return parser


def shares(n_kills: int, names: Sequence[str]) -> dict[str, int]:
    """Kills of each subsystem: at least 1, and a slow one gets a third of what the others get."""
    weights = {name: 1 if name in SLOW else 3 for name in names}
    counts = dict.fromkeys(names, 1)
    for _ in range(n_kills - len(names)):
        counts[min(names, key=lambda name: counts[name] / weights[name])] += 1
    return counts


def run_trials(name: str, n_kills: int, seed: int, folder: Path, inputs: "Inputs") -> "Tally":
    """All trials of a subsystem. SkippedError where it cannot be started here."""
    from kill.jobs import JOBS
    from kill.server import ServerTrials
    from kill.trials import Trials

    rng = random.Random(f"{seed} {name}")
    work, logs = folder / name / "work", folder / "logs"
    trials = (
        ServerTrials(inputs, work, rng, logs)
        if name == SERVER
        else Trials(JOBS[name](inputs, work), rng, logs)
    )
    return trials.run(n_kills)


def format_row(tally: "Tally", seconds: float) -> str:
    """One line of the table."""
    phases = " ".join(f"{tally.phases[phase]:5}" for phase in PHASES)
    targets = " ".join(f"{target} {n}" for target, n in sorted(tally.targets.items()))
    equal = f"{tally.n_equal}/{tally.n_trials}"
    return (
        f"{tally.name:16} {tally.n_hits:5} {tally.n_missed:6} {phases} {tally.n_restarts:8} {equal:>6} "
        f"{len(tally.leftovers):9} {seconds:5.0f} s  {targets}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Kill, print the table, and what went wrong."""
    args = build_parser().parse_args(argv)
    # after the words: --help should not wait for libraries
    from kill.inputs import Inputs
    from kill.jobs import SkippedError
    from kill.trials import Tally

    folder = Path(tempfile.mkdtemp(prefix="kills-", dir=args.folder))
    (folder / "logs").mkdir()
    inputs = Inputs(folder / "inputs")
    tallies, start = [], time.monotonic()
    print(f"{COLUMNS} restarts  equal leftovers    time  killed")
    for name, n_kills in shares(args.kills, args.only).items():
        began = time.monotonic()
        try:
            tallies.append(run_trials(name, n_kills, args.seed, folder, inputs))
        except SkippedError as error:
            print(f"{name:16} skipped: {error}", flush=True)
            continue
        except RuntimeError as error:
            tallies.append(Tally(name, faults=[str(error)]))
        print(format_row(tallies[-1], time.monotonic() - began), flush=True)
        for fault in (*tallies[-1].faults, *tallies[-1].leftovers):
            print(f"  {name}: {fault}", file=sys.stderr, flush=True)
        shutil.rmtree(folder / name, ignore_errors=True)
    n_hits, n_trials = sum(one.n_hits for one in tallies), sum(one.n_trials for one in tallies)
    n_equal = sum(one.n_equal for one in tallies)
    print(f"{n_hits} kills hit, {n_equal} of {n_trials} outcomes equal, {time.monotonic() - start:.0f} s")
    if any(one.faults or one.leftovers for one in tallies):
        print(f"{folder}: logs and files of what went wrong", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    run(main)
