"""Write the report of a study: one HTML page that opens with no network.

python tools/make_report.py experiments/quickstart
python tools/make_report.py experiments/quickstart --figures paper/figures  # PNG and PDF of each
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, failed, run
from megatron.scaling import summary, verdict
from megatron.scaling.export import export_figures
from megatron.scaling.law import Law
from megatron.scaling.report import colours_of, figures_of, write_report
from megatron.scaling.study import Study, read_study


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "study_dir",
        type=Path,
        metavar="STUDY_DIR",
        help="the directory that holds runs/, and law.json if there is one",
    )
    parser.add_argument(
        "--out", type=Path, metavar="PAGE.html", help="where the page goes; by itself STUDY_DIR/report.html"
    )
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="also each figure as PNG and PDF; wants chromium"
    )
    return parser


def print_law(study: Study, law: Law) -> None:
    """The law, or why it may not be quoted and which runs would help."""
    if verdict.is_sound(law):
        print(f"law: {law.formula()}")
        return
    for line in verdict.doubts(law):
        print(f"law: {line}")
    if law.identified is False and study.law is not None and (words := summary.to_do(study)):
        print(f"to do: {words}")


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        path = write_report(args.study_dir, args.out)
        drawn = []
        if args.figures:
            study = read_study(args.study_dir)
            drawn = export_figures(figures_of(study), colours_of(study), args.figures)
    except (OSError, ValueError) as error:
        return failed(error)
    law = args.study_dir / "law.json"
    if law.is_file():
        print_law(read_study(args.study_dir), Law.load(law))
    print(f"report: {path}")
    if drawn:
        print(f"figures: {len(drawn)} files in {args.figures}")
    return 0


if __name__ == "__main__":
    run(main)
