"""Compare the held-out losses of two runs, or of two cells of several seeds, against the noise floor.

python tools/compare_runs.py experiments/study RUN_A RUN_B
python tools/compare_runs.py table.csv RUN_A RUN_B --law law.json --json
python tools/compare_runs.py experiments/study --best
python tools/compare_runs.py experiments/study --best objective

RUN is the name of a run or a prefix of it. A prefix that matches all seeds of one cell compares their mean.
The noise is estimated from runs that differ only in their seed, otherwise from the scatter around the study's
law. If both runs have per-document losses (tools/validate.py --save-per-document), their paired error is
added.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.cli import create_parser, report_error, run_main
from megatron.io import replace_nonfinite
from megatron.laws.law import Law
from megatron.report.difference_text import describe_difference, describe_floor, format_text_table
from megatron.study.differences import (
    LEVEL,
    Difference,
    Side,
    compare_best,
    compare_runs,
    estimate_noise_floors,
    find_side,
)
from megatron.study.table import read_runs, read_table

if TYPE_CHECKING:
    from pandas import DataFrame

DOCUMENTS = "validation/*/*.documents.parquet"  # relative to the run's folder


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "study", type=Path, metavar="STUDY_DIR|TABLE.csv", help="a study or a table of its runs"
    )
    parser.add_argument("a", nargs="?", metavar="RUN_A", help="a run or a cell, or a prefix of its name")
    parser.add_argument("b", nargs="?", metavar="RUN_B", help="the run or cell to compare with")
    parser.add_argument(
        "--best",
        nargs="?",
        const="compute",
        choices=("compute", "objective"),
        help="compare the lowest loss with the others, for each compute or each objective",
    )
    parser.add_argument(
        "--law", type=Path, metavar="LAW.json", help="for a table: law whose scatter is the noise"
    )
    parser.add_argument(
        "--level", type=float, default=LEVEL, metavar="SHARE", help="confidence level of the intervals"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and check their combinations."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.best is None and (args.a is None or args.b is None):
        parser.error("got no RUN_A and RUN_B and no --best, expected one of the two")
    if args.best is not None and args.a is not None:
        parser.error("got --best and RUN_A, expected one of the two")
    if not 0 < args.level < 1:
        parser.error(f"--level: got {args.level:g}, expected a share between 0 and 1")
    return args


def read_source(path: Path, law: Path | None) -> tuple["DataFrame", dict[str, Law]]:
    """Return the runs and the laws by objective. Raise ValueError for a table without names or losses."""
    table = read_runs(path) if path.is_dir() else read_table(path)
    files = [*([law] if law else []), *(sorted(path.glob("law*.json")) if path.is_dir() else [])]
    for name in ("run", "loss"):
        if name not in table:
            raise ValueError(f"{path}: got no column {name!r}. Write a table with tools/collect.py.")
    table = table.reindex(columns=list(dict.fromkeys([*table, "objective"])))
    laws: dict[str, Law] = {}
    for file in files:
        loaded = Law.load(file)
        # a law without a filter on the objective is one of autoregressive runs
        laws.setdefault(str(loaded.filter.get("objective", "autoregressive")), loaded)
    return table, laws


def paired_error(folder: Path, a: Side, b: Side) -> tuple[float, float] | None:
    """Return the standard error of the paired difference over documents (nats), and its degrees of freedom.

    Return None for cells, and if the runs have no per-document files of the same name and documents.
    """
    # documents pair only between two single runs: the mean of a cell has no per-document losses
    if not folder.is_dir() or a.n_seeds > 1 or b.n_seeds > 1:
        return None
    from megatron.evaluation.compare import compare_documents

    files = [
        {path.name: path for path in sorted((folder / str(side.runs["path"].iloc[0])).glob(DOCUMENTS))}
        for side in (a, b)
    ]
    for name in sorted(files[0].keys() & files[1].keys()):
        try:
            comparison = compare_documents(files[0][name], files[1][name], n_bootstrap=2000)
        # other documents under the same name: the next pair of files may match
        except ValueError:
            continue
        # the standard error of a normal 95 % interval of the bootstrap
        return (comparison.high - comparison.low) / (2 * 1.959964), comparison.n_documents - 1.0
    return None


def compare_two(args: argparse.Namespace, table: "DataFrame", laws: Mapping[str, Law]) -> Difference:
    """Return the difference of the two runs or cells given on the command line."""
    a, b = find_side(table, args.a), find_side(table, args.b)
    paired = paired_error(args.study, a, b)
    return compare_runs(table, args.a, args.b, level=args.level, laws=laws, paired=paired)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the noise floor, a table of differences and the conclusion."""
    args = parse_args(argv)
    try:
        table, laws = read_source(args.study, args.law)
        floors = estimate_noise_floors(table, laws, args.level)
        if args.best is None:
            groups = [[compare_two(args, table, laws)]]
        else:
            groups = compare_best(table, same=args.best, level=args.level, laws=laws)
        if not groups:
            raise ValueError(
                f"{args.study}: got no two finished runs of the same {args.best}, expected at least one pair."
            )
    except (OSError, ValueError) as error:
        return report_error(error)
    if args.json:
        answer = {
            "noise_floor": {name: asdict(floor) for name, floor in floors.items()},
            "differences": [asdict(difference) for group in groups for difference in group],
        }
        print(json.dumps(replace_nonfinite(answer), indent=1, allow_nan=False))
        return 0
    for name, floor in floors.items():
        print(describe_floor(name, floor))
    for group in groups:
        print(f"\n{format_text_table(group)}\n{describe_difference(group[0])}")
    return 0


if __name__ == "__main__":
    run_main(main)
