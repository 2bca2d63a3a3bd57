"""Write the report of a study as one HTML page that works offline.

python tools/make_report.py experiments/quickstart
python tools/make_report.py experiments/quickstart --price-per-hour 2.5
python tools/make_report.py experiments/quickstart --figures paper/figures  # PNG, PDF and SVG of each
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import create_parser, run_main
from megatron.study.price import Tariff, add_tariff_options


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    plotly = "The page has the build of plotly.js that is installed"
    parser = create_parser(__doc__, removed={"--currency": "A price is in any unit", "--plotly-js": plotly})
    add = parser.add_argument
    study = "directory that contains runs/ or table.csv and, if fitted, compute_law.json and law.json"
    add("study_dir", type=Path, metavar="STUDY_DIR", help=study)
    add("--out", type=Path, metavar="PAGE.html", help="output file; default: STUDY_DIR/report.html")
    figures = "also write figures as PNG, PDF and SVG and their data (requires kaleido, chromium)"
    add("--figures", type=Path, metavar="FOLDER", help=figures)
    add_tariff_options(parser.add_argument_group("cost"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and the figures, and print the answer and their paths."""
    args = build_parser().parse_args(argv)
    from megatron.report.answer import make_answer  # slow imports after the arguments have been parsed
    from megatron.report.report import export_figures, make_figures, write_report
    from megatron.report.study_data import read_study

    path = write_report(args.study_dir, args.out, Tariff(args.price_per_hour, args.watts))
    study = read_study(args.study_dir)
    answer = make_answer(study)
    for line in filter(None, (answer.verdict, answer.check, answer.todo)):
        print(line)
    print(f"report: {path}")
    if args.figures:
        command = ["python", "tools/make_report.py", str(args.study_dir), "--figures", str(args.figures)]
        paths = export_figures(make_figures(study), args.figures, shlex.join(command))
        print(f"figures: {len(paths)} files in {args.figures}")
    return 0


if __name__ == "__main__":
    run_main(main)
