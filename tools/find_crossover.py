"""Find the compute above which one objective beats another on the same unique text.

python tools/find_crossover.py law_autoregressive.json law_masked_diffusion.json --unique 1e8 1e9 1e10
python tools/find_crossover.py experiments/study_crossover_cpu
python tools/find_crossover.py experiments/study_crossover_cpu --without '*masked*' '*drop*'
python tools/find_crossover.py experiments/study_crossover_cpu --seal 131072

With two laws, both are evaluated at their best sizes. With a study, or its table.csv, the losses of its runs
are compared: settings are selected by dataset.path_eval, and reported on dataset.path_test by fresh seeds
(runs with held_out: true). The result is written to crossover.json in the folder of a study, except with
--without, which answers what the crossing would have been without some runs of the first objective.
"""

import argparse
import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, positive_float, report_error, run_main
from megatron.laws.crossover import crossover
from megatron.laws.law import Law


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "first",
        type=Path,
        metavar="FIRST.json",
        help="law of the objective that is better at low compute, the folder of a study, or its table.csv",
    )
    parser.add_argument(
        "second", type=Path, nargs="?", metavar="SECOND.json", help="law of the other objective"
    )
    parser.add_argument(
        "--seal",
        type=positive_float,
        metavar="TOKENS",
        help="of a study: store forecasts for this amount of unique text, before its runs",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="leave out the autoregressive runs whose name matches, and store nothing",
    )
    parser.add_argument(
        "--unique", type=float, nargs="+", default=[1e7, 1e8, 1e9, 1e10], metavar="TOKENS",
        help="amounts of unique text",
    )  # fmt: skip
    parser.add_argument(
        "--replicates",
        type=int,
        metavar="N",
        default=50,
        help="pairs of bootstrap replicates for the interval",
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and check their combinations."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.seal is not None and (args.second is not None or args.first.is_file()):
        parser.error("--seal requires the folder of a study")
    if args.without and (args.second is not None or args.seal is not None):
        parser.error("--without requires a study or its table, and no --seal")
    return args


def measure(args: argparse.Namespace) -> int:
    """Print and store the measured crossovers of a study, or seal forecasts for another text."""
    from megatron.study import measured  # imports scipy, which --help does not need
    from megatron.study.forecast import LEVELS
    from megatron.study.sealing import seal_text
    from megatron.study.table import read_runs, read_table, select_finished

    is_table = args.first.suffix == ".csv"
    if args.seal is not None:
        for forecast in seal_text(args.first, args.seal):
            ends = ", ".join(
                f"{100 * level:g} % [{low:.4g}, {high:.4g}]"
                for level, (low, high) in zip(LEVELS, forecast.intervals, strict=True)
            )
            print(f"{forecast.name}: {forecast.predicted:.4g}; {ends}; sha256 {forecast.sha256()[:12]}")
        return 0
    table = select_finished(read_table(args.first) if is_table else read_runs(args.first))
    is_left_out = table["run"].map(lambda run: _matches(run, args.without)).astype(bool)
    compared = table[~(is_left_out & (table["objective"] == measured.FIRST))]
    if args.without and len(compared) == len(table):
        raise ValueError(
            f"--without: got {' '.join(args.without)}, which match no autoregressive run of {args.first}. "
            "Quote patterns with *, and see the column run of table.csv."
        )
    if args.without:
        print(f"without {len(table) - len(compared)} runs that match {' '.join(args.without)}")
    crossovers, law = measured.measure_study(compared)
    for at in crossovers:
        print(measured.format_measured(at))
    if law is not None:
        low, high = law.interval
        # two crossings whose own noise is not bounded leave no degree of freedom
        confidence = (
            f"95 % confidence of the exponent [{low:.3g}, {high:.3g}]"
            if math.isfinite(low) and math.isfinite(high)
            else "confidence of the exponent not determined"
        )
        print(f"C_crit = {law.coefficient:.3g} U^{law.exponent:.3g}, {confidence}, {law.dof + 2} crossings")
    if not args.without and not is_table:
        print(f"{measured.write_crossover(args.first, crossovers, law)}: {len(crossovers)} texts")
    return 0


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def main(argv: Sequence[str] | None = None) -> int:
    """Find the crossovers and print one line for each amount of unique text."""
    args = parse_args(argv)
    try:
        if args.second is None:
            return measure(args)
        wrong = [n_tokens for n_tokens in args.unique if not 0 < n_tokens < math.inf]
        if wrong:
            raise ValueError(f"--unique: got {wrong[0]}, expected a number of tokens above 0")
        laws = [Law.load(args.first), Law.load(args.second)]
        result = crossover(*laws, args.unique, n_replicates=args.replicates)
    except (OSError, ValueError) as error:
        return report_error(error)
    for i, (u, c) in enumerate(zip(result.U, result.C, strict=True)):
        ends = (
            ""
            if result.ends is None
            else f"  95 % confidence [{result.ends[0][i]:.3g}, {result.ends[1][i]:.3g}]"
        )
        print(f"U {u:.3g} tokens: " + (f"C_crit {c:.4g} FLOPs{ends}" if math.isfinite(c) else "no crossover"))
    return 0


if __name__ == "__main__":
    run_main(main)
