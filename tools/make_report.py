"""Write the report of a study as one HTML page that works offline.

python tools/make_report.py experiments/quickstart
python tools/make_report.py experiments/quickstart --price-per-hour 2.5 --currency EUR
python tools/make_report.py experiments/quickstart --figures paper/figures  # PNG, PDF and SVG of each
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.cli import create_parser, report_error, run_main

if TYPE_CHECKING:
    from megatron.laws.law import Law
    from megatron.report.study_data import Study


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "study_dir",
        type=Path,
        metavar="STUDY_DIR",
        help="directory that contains runs/ and, if fitted, law.json",
    )
    parser.add_argument(
        "--out", type=Path, metavar="PAGE.html", help="output file; default: STUDY_DIR/report.html"
    )
    parser.add_argument(
        "--figures",
        type=Path,
        metavar="FOLDER",
        help="also write each figure as PNG, PDF and SVG and its data as JSON (requires kaleido, chromium)",
    )
    from megatron.study.tariff import add_tariff_options

    add_tariff_options(parser.add_argument_group("cost"))
    return parser


def print_law(study: "Study", law: "Law") -> None:
    """Print the law, or the reasons not to quote it and the runs that would identify it."""
    from megatron.report import summary, verdict

    if verdict.is_sound(law):
        print(f"law: {law.formula()}")
        return
    for line in verdict.list_law_doubts(law):
        print(f"law: {line}")
    if law.identified is False and study.law is not None and (words := summary.suggest_runs(study)):
        print(f"to do: {words}")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and the figures, and print their paths."""
    args = build_parser().parse_args(argv)
    from megatron.laws.law import Law  # slow imports after the arguments have been parsed
    from megatron.report.export import export_figures
    from megatron.report.report import make_colours, make_figures, write_report
    from megatron.report.study_data import read_study
    from megatron.study.tariff import read_tariff

    try:
        path = write_report(args.study_dir, args.out, read_tariff(args))
        paths = []
        if args.figures:
            study = read_study(args.study_dir)
            command = shlex.join(
                map(str, ("python", "tools/make_report.py", args.study_dir, "--figures", args.figures))
            )
            paths = export_figures(make_figures(study), make_colours(study), args.figures, command)
    except (OSError, ValueError) as error:
        return report_error(error)
    law = args.study_dir / "law.json"
    if law.is_file():
        print_law(read_study(args.study_dir), Law.load(law))
    print(f"report: {path}")
    if paths:
        print(f"figures: {len(paths)} files in {args.figures}")
    return 0


if __name__ == "__main__":
    run_main(main)
