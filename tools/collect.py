"""Collect the runs of a study into one table, on the screen and as CSV.

python tools/collect.py experiments/quickstart
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron.scaling import wording
from megatron.scaling.table import Row, read_runs, write_table

SHOWN = {
    "run": lambda row: row["run"],
    "status": lambda row: row["status"],
    "N": lambda row: wording.count(row["n_params"], 3),
    "D": lambda row: wording.count(row["train_tokens"], 3),
    "epochs": lambda row: wording.NOT_KNOWN if row["epochs"] is None else wording.digits(row["epochs"], 2),
    "FLOPs": lambda row: wording.exponent(row["train_flops"]),
    "loss": lambda row: wording.loss(row["loss"], row["loss_se"]),
    "time": lambda row: wording.duration(row["wall_s"]),
    "note": lambda row: row["note"],
}


def aligned(rows: Sequence[Row]) -> str:
    """Rows as text in columns; words to the left, numbers to the right."""
    lines = [list(SHOWN), *([str(show(row)) for show in SHOWN.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = zip(SHOWN, line, widths, strict=True)
        text.append(
            "  ".join(
                f"{cell:<{w}}" if name in ("run", "status", "note") else f"{cell:>{w}}"
                for name, cell, w in cells
            ).rstrip()
        )
    return "\n".join(text)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study_dir", type=Path, help="the directory that holds runs/")
    parser.add_argument("--out", type=Path, help="where the CSV goes (default: STUDY_DIR/table.csv)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    out = args.out or args.study_dir / "table.csv"
    try:
        rows = read_runs(args.study_dir)
        write_table(rows, out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(aligned(rows))
    counts = Counter(row["status"] for row in rows)
    print(f"\n{out}: {wording.listed([f'{n} {status}' for status, n in counts.most_common()]) or 'no runs'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
