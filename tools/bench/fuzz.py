"""Feed changed and made-up inputs to every place where data from outside comes in,
and count what comes of them.

    python tools/bench/fuzz.py --inputs 100000 --out fuzzing-failures
    python tools/bench/fuzz.py --inputs 500 --only jsonl law.json --seed 7
    python tools/bench/fuzz.py --list

Valid inputs of each format are changed where the format has its numbers, names and lengths; the same seed
gives the same inputs. Each entrance runs in a process of its own. The columns: inputs; passed,
which got past the
check of the container format; accepted; refused, by ValueError or OSError in the project's words; foreign,
refused in a library's words; tracebacks, of any other exception; wrong, which were accepted as something
else than a reference reads; hangs; crashes; places,
the lines of code that refused. An input that ends in one of
the last four kinds of failure is kept in a folder of its own below --out, and the exit status is 1.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.command import command, count, run, whole

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    add = parser.add_argument_group("inputs").add_argument
    add("--inputs", type=count, default=100_000, metavar="N", help="of all entrances together")
    add("--seed", type=whole, default=0, metavar="N", help="of the changes")
    add("--only", nargs="+", default=[], metavar="ENTRANCE", help="some entrances; default: all")
    add("--list", action="store_true", help="print the names of the entrances, and end")
    add = parser.add_argument_group("limits").add_argument
    add("--seconds", type=float, metavar="S", help="of CPU time for each entrance")
    add("--hang", type=float, default=30.0, metavar="S", help="for one input, by the clock")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="for failing inputs; default: a folder in the system's for such",
    )
    return parser


def choose(entrances: Sequence[Any], only: Sequence[str]) -> list[Any]:
    """The entrances of some names. ValueError for an unknown one."""
    names = [one.name for one in entrances]
    for name in only:
        if name not in names:
            raise ValueError(f"--only: got '{name}', expected some of: {', '.join(names)}.")
    return [one for one in entrances if not only or one.name in only]


def print_row(name: str, counts: dict[str, int], n_places: int, cpu_s: float) -> None:
    """One line of the table."""
    print(
        f"{name:22}" + "".join(f"{n:11,}" for n in counts.values()) + f"{n_places:8}{cpu_s:9.1f}", flush=True
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz, print the table, end with 1 where an input was a failure."""
    args = build_parser().parse_args(argv)
    os.environ |= ENVIRONMENT
    sys.path.insert(0, str(Path(__file__).parent))
    from fuzzing import checkpoints, configs, corpora, mixtures, studies, text
    from fuzzing.harness import COUNTS, FAILURES, Limits, fuzz

    entrances = [
        one for part in (text, corpora, configs, checkpoints, mixtures, studies) for one in part.ENTRANCES
    ]
    if args.list:
        print("\n".join(one.name for one in entrances))
        return 0
    chosen = choose(entrances, args.only)
    out = args.out or Path(tempfile.mkdtemp(prefix="fuzz-"))
    out.mkdir(parents=True, exist_ok=True)
    shares = sum(one.share for one in chosen)
    total, places, cpu_s = dict.fromkeys(COUNTS, 0), 0, 0.0
    print(
        f"{'entrance':22}" + "".join(f"{name:>11}" for name in COUNTS) + f"{'places':>8}{'CPU s':>9}",
        flush=True,
    )
    for entrance in chosen:
        n_inputs = max(1, round(args.inputs * entrance.share / shares))
        result = fuzz(entrance, n_inputs, args.seed, out, Limits(args.seconds, args.hang))
        print_row(entrance.name, result.counts, len(result.places), result.cpu_s)
        total = {name: total[name] + n for name, n in result.counts.items()}
        places, cpu_s = places + len(result.places), cpu_s + result.cpu_s
    print_row("all", total, places, cpu_s)
    n_failed = sum(total[name] for name in FAILURES)
    if n_failed:
        print(f"{out}: {n_failed:,} failing inputs, each in a folder with its error")
    return int(n_failed > 0)


if __name__ == "__main__":
    run(main)
