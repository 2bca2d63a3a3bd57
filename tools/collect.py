"""Collect runs into one table, on the screen, as CSV and as parquet: those of a study, or of other programs.

python tools/collect.py experiments/quickstart
python tools/collect.py logs/*.log --from torchtitan --set unique_tokens=1e9 --out table.csv
python tools/collect.py logs/*.log --from megatron --facts facts.csv --out table.csv
python tools/collect.py runs/ --from tensorboard --set n_params=1e8 tokens_per_step=524288 --out table.csv
python tools/collect.py export.csv --from wandb --facts facts.csv --out table.csv
python tools/collect.py published.csv --from csv --map loss=val_loss n_params=params --out table.csv
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, failed, run
from megatron.scaling import wording
from megatron.scaling.foreign import FACTS, KINDS, fact, read_facts, read_foreign
from megatron.scaling.scores import beside, read_scores, write_scores
from megatron.scaling.study import SCORES
from megatron.scaling.table import Row, read_runs, write_parquet, write_table

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


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument(
        "paths", type=Path, nargs="+", metavar="STUDY_DIR", help="the directory that holds runs/; or logs"
    )
    parser.add_argument("--out", type=Path, metavar="TABLE.csv", help="by itself STUDY_DIR/table.csv")
    other = parser.add_argument_group("runs of other programs")
    other.add_argument("--from", choices=KINDS, dest="kind", help="what wrote them")
    other.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", dest="told",
        help=f"what the logs do not say, of every run: {', '.join(FACTS)}",
    )  # fmt: skip
    other.add_argument("--facts", type=Path, metavar="FACTS.csv", help="the same by run: a column 'run'")
    other.add_argument(
        "--map", nargs="+", default=[], metavar="OURS=THEIRS", help="columns of a csv, as loss=val_loss"
    )
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Words that go together."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.kind is None and (len(args.paths) > 1 or args.told or args.facts or args.map):
        parser.error("several paths, --set, --facts and --map go with --from")
    if args.kind is not None and args.out is None:
        parser.error("--from wants --out TABLE.csv")
    return args


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """NAME=VALUE words."""
    for word in words:
        if "=" not in word:
            raise ValueError(f"{option} {word}: wanted NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def collected(args: argparse.Namespace) -> list[Row]:
    """The rows of a study, or of other programs' runs."""
    if args.kind is None:
        return read_runs(args.paths[0])
    facts = read_facts(args.facts) if args.facts else {}
    facts[""] = {name: fact(name, text) for name, text in pairs(args.told, "--set").items()}
    return read_foreign(args.paths, args.kind, facts, pairs(args.map, "--map"))


def with_scores(args: argparse.Namespace, rows: list[Row]) -> tuple[list[Row], str]:
    """The rows with the downstream scores that a study's runs have, which scores.csv gets too; a sentence."""
    scores = [] if args.kind is not None else read_scores(args.paths[0], rows)
    if not scores:
        return rows, ""
    path = args.paths[0] / SCORES
    if not write_scores(scores, path):
        return beside(
            rows, scores
        ), f"\n{path}: not of this tool, left as it is; move it away for the new one\n"
    n_tasks, n_runs = len({one.task for one in scores}), len({one.run for one in scores})
    return beside(rows, scores), f"\n{path}: {n_tasks} downstream tasks, {n_runs} runs\n"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    out = args.out or args.paths[0] / "table.csv"
    try:
        if out.suffix == ".parquet":
            raise ValueError(f"--out {out}: wanted the name of the CSV; the parquet is written beside it")
        rows, told_scores = with_scores(args, collected(args))
        write_table(rows, out)
        write_parquet(rows, out.with_suffix(".parquet"))
    except (OSError, ValueError) as error:
        return failed(error)
    print(aligned(rows))
    print(told_scores, end="")
    counts = Counter(row["status"] for row in rows)
    told = wording.listed([f"{n} {status}" for status, n in counts.most_common()]) or "no runs"
    print(f"\n{out.with_suffix('.parquet')}: the same table\n{out}: {told}")
    return 0


if __name__ == "__main__":
    run(main)
