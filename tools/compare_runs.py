"""Compare the held-out losses of two runs, or of two cells of several seeds, against the noise floor.

python tools/compare_runs.py experiments/study RUN_A RUN_B
python tools/compare_runs.py table.csv RUN_A RUN_B --law law.json --json
python tools/compare_runs.py experiments/study --best
python tools/compare_runs.py experiments/study --best objective

RUN is the name of a run or its beginning; where that begins the names of all seeds of one cell, their mean is
compared. The noise is that of runs that differ in their seed alone, else the scatter around the study's law.
Losses document by document of both runs (tools/validate.py --save-per-document) add their paired error.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.command import command, failed, run
from megatron.run_dir import with_null
from megatron.scaling.cells import Side, find_side
from megatron.scaling.difference_words import floor_words, text_table, verdict_words
from megatron.scaling.differences import LEVEL, Difference, compare_best, compare_runs, noise_floors
from megatron.scaling.law import Law
from megatron.scaling.study import read_study
from megatron.scaling.table import Row, read_rows

DOCUMENTS = "validation/*/*.documents.parquet"  # in a run's folder


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("study", type=Path, metavar="STUDY_DIR|TABLE.csv", help="a study, or its table")
    parser.add_argument("a", nargs="?", metavar="RUN_A", help="a run or a cell, or the beginning of its name")
    parser.add_argument("b", nargs="?", metavar="RUN_B", help="another")
    parser.add_argument(
        "--best",
        nargs="?",
        const="compute",
        choices=("compute", "objective"),
        help="the lowest loss against the others: of each compute, or of each objective",
    )
    parser.add_argument("--law", type=Path, metavar="LAW.json", help="of a table: whose scatter is the noise")
    parser.add_argument("--level", type=float, default=LEVEL, metavar="SHARE", help="of the intervals")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Words that go together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.best is None and (args.a is None or args.b is None):
        parser.error("got no RUN_A and RUN_B and no --best, expected one of the two")
    if args.best is not None and args.a is not None:
        parser.error("got --best and RUN_A, expected one of the two")
    if not 0 < args.level < 1:
        parser.error(f"--level: got {args.level:g}, expected a share between 0 and 1")
    return args


def read_source(path: Path, law: Path | None) -> tuple[list[Row], dict[str, Law]]:
    """Finished runs and the laws of their objectives."""
    if path.is_dir():
        study = read_study(path)
        rows, laws = study.done(), dict(study.laws)
    else:
        rows, laws = [row for row in read_rows(path) if row["status"] in (None, "done")], {}
    if law is not None:
        one = Law.load(law)
        laws[str(one.filter.get("objective", "autoregressive"))] = one
    return rows, laws


def paired_error(folder: Path, a: Side, b: Side) -> tuple[float, float] | None:
    """Standard error in nats of the difference over documents, and its degrees of freedom.

    None for cells, and where the two runs have no file of documents of one name, or of other documents.
    """
    if not folder.is_dir() or a.n_seeds > 1 or b.n_seeds > 1:
        return None
    from megatron.evaluation.compare import compare_documents

    files = [
        {path.name: path for path in sorted((folder / str(side.rows[0]["path"])).glob(DOCUMENTS))}
        for side in (a, b)
    ]
    for name in sorted(files[0].keys() & files[1].keys()):
        try:
            found = compare_documents(files[0][name], files[1][name], n_bootstrap=2000)
        except ValueError:
            continue
        return (found.high - found.low) / (2 * 1.959964), found.n_documents - 1.0
    return None


def compare_two(args: argparse.Namespace, rows: Sequence[Row], laws: Mapping[str, Law]) -> Difference:
    """The difference of the two that were named."""
    a, b = find_side(rows, args.a), find_side(rows, args.b)
    paired = paired_error(args.study, a, b)
    return compare_runs(rows, a, b, level=args.level, laws=laws, paired=paired)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and a sentence."""
    args = parse_args(argv)
    try:
        rows, laws = read_source(args.study, args.law)
        floors = noise_floors(rows, laws, args.level)
        if args.best is None:
            groups = [[compare_two(args, rows, laws)]]
        else:
            groups = compare_best(rows, same=args.best, level=args.level, laws=laws)
        if not groups:
            raise ValueError(f"{args.study}: no two finished runs of the same {args.best}, expected some.")
    except (OSError, ValueError) as error:
        return failed(error)
    if args.json:
        answer = {
            "noise_floor": {name: floor.as_dict() for name, floor in floors.items()},
            "differences": [one.as_dict() for group in groups for one in group],
        }
        print(json.dumps(with_null(answer), indent=1, allow_nan=False))
        return 0
    for name, floor in floors.items():
        print(floor_words(name, floor))
    for group in groups:
        print(f"\n{text_table(group)}\n{verdict_words(group[0])}")
    return 0


if __name__ == "__main__":
    run(main)
