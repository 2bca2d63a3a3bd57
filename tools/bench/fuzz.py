"""Feed mutated and generated inputs to every fuzz target of external data, and count the outcomes.

    python tools/bench/fuzz.py --inputs 100000 --out fuzzing-failures
    python tools/bench/fuzz.py --inputs 500 --only jsonl law.json --seed 7
    python tools/bench/fuzz.py --list

Valid inputs of each format are mutated at its numbers, names and lengths; the same seed gives the same
inputs. Each fuzz target runs in a separate process. The columns:

    inputs      number of inputs
    passed      inputs that passed the check of the container format
    accepted    inputs that were read
    refused     ValueError or OSError with a message of the project
    foreign     ValueError or OSError with a message of a library
    tracebacks  any other exception
    wrong       accepted, but read differently from a reference
    hangs, crashes
    places      lines of code that refused inputs

Inputs that end in tracebacks, wrong, hangs or crashes are stored in a folder each below --out; the exit
status is then 1.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from history import add_history_options, record_result

from megatron.cli import create_parser, non_negative_int, positive_int, run_main

# set before the imports in `main`, since some libraries read these at import
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("inputs").add_argument
    add(
        "--inputs",
        type=positive_int,
        default=100_000,
        metavar="N",
        help="inputs of all fuzz targets together",
    )
    add("--seed", type=non_negative_int, default=0, metavar="N", help="seed of the mutations")
    add("--only", nargs="+", default=[], metavar="TARGET", help="fuzz targets to fuzz; default: all")
    add("--list", action="store_true", help="print the names of the fuzz targets, and exit")
    add = parser.add_argument_group("limits").add_argument
    add("--seconds", type=float, metavar="S", help="limit of CPU seconds for each fuzz target")
    add(
        "--hang",
        type=float,
        default=30.0,
        metavar="S",
        help="wall seconds after which one input counts as a hang",
    )
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for failing inputs; default: a temporary folder",
    )
    add_history_options(parser)
    return parser


def choose_targets(targets: Sequence[Any], only: Sequence[str]) -> list[Any]:
    """Return the fuzz targets with the given names. Raise ValueError for an unknown name."""
    names = [target.name for target in targets]
    for name in only:
        if name not in names:
            raise ValueError(f"--only: got '{name}', expected one of: {', '.join(names)}.")
    return [target for target in targets if not only or target.name in only]


def print_row(name: str, counts: dict[str, int], n_places: int, cpu_s: float) -> None:
    """Print one line of the table."""
    print(
        f"{name:22}" + "".join(f"{n:11,}" for n in counts.values()) + f"{n_places:8}{cpu_s:9.1f}", flush=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz and print the table; return 1 if any input failed."""
    args = build_parser().parse_args(argv)
    os.environ |= ENVIRONMENT
    # `fuzzing` is a folder beside this file and not part of the package
    sys.path.insert(0, str(Path(__file__).parent))
    from fuzzing import checkpoints, configs, corpora, foreign_models, studies, text
    from fuzzing.harness import COUNTS, FAILURES, Limits, fuzz_target

    targets = [
        target
        for part in (text, corpora, configs, checkpoints, foreign_models, studies)
        for target in part.TARGETS
    ]
    if args.list:
        print("\n".join(target.name for target in targets))
        return 0
    chosen = choose_targets(targets, args.only)
    out = args.out or Path(tempfile.mkdtemp(prefix="fuzz-"))
    out.mkdir(parents=True, exist_ok=True)
    shares = sum(target.share for target in chosen)
    total, places, cpu_s = dict.fromkeys(COUNTS, 0), 0, 0.0
    print(
        f"{'target':22}" + "".join(f"{name:>11}" for name in COUNTS) + f"{'places':>8}{'CPU s':>9}",
        flush=True,
    )
    for target in chosen:
        # shares 2 and 3 of 100 inputs: 40 and 60
        n_inputs = max(1, round(args.inputs * target.share / shares))
        result = fuzz_target(target, n_inputs, args.seed, out, Limits(args.seconds, args.hang))
        print_row(target.name, result.counts, len(result.places), result.cpu_s)
        total = {name: total[name] + n for name, n in result.counts.items()}
        places, cpu_s = places + len(result.places), cpu_s + result.cpu_s
    print_row("all", total, places, cpu_s)
    n_failed = sum(total[name] for name in FAILURES)
    cell = f"{len(chosen)} targets, {args.inputs} inputs, seed {args.seed}"
    record_result(args.history, "fuzz", f"{cell}: failures", n_failed, "inputs", better="lower")
    record_result(args.history, "fuzz", f"{cell}: time", cpu_s, "CPU-s", better="lower")
    if n_failed:
        print(f"{out}: {n_failed:,} failing inputs, each in a folder with its error")
    return int(n_failed > 0)


if __name__ == "__main__":
    run_main(main)
