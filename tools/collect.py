"""Collect the runs of a study, or the logs of other programs, into one table: printed, as CSV and as parquet.

python tools/collect.py experiments/quickstart
python tools/collect.py experiments/quickstart --references gpt2.scores EleutherAI__pythia-70m.scores
python tools/collect.py logs/*.log --from torchtitan --set unique_tokens=1e9 --out table.csv
python tools/collect.py logs/*.log --from megatron --facts facts.csv --out table.csv
python tools/collect.py runs/ --from tensorboard --set n_params=1e8 tokens_per_step=524288 --out table.csv
python tools/collect.py export.csv --from wandb --facts facts.csv --out table.csv
python tools/collect.py published.csv --from csv --map loss=val_loss n_params=params --out table.csv
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from megatron.cli import create_parser, print_table, run_main
from megatron.study.downstream_scores import (
    REFERENCE_FACTS,
    REFERENCES,
    add_score_columns,
    read_references,
    read_scores,
    write_scores,
)
from megatron.study.forecast import (
    FORECASTS,
    describe_calibration,
    read_forecasts,
    score_forecasts,
    write_forecast_table,
)
from megatron.study.format import (
    NOT_KNOWN,
    format_count,
    format_digits,
    format_duration,
    format_exponent,
    format_loss,
    join_list,
)
from megatron.study.importers import FACTS, KINDS, parse_fact, read_external_logs, read_facts
from megatron.study.table import read_runs, write_table


def format_known(value: float, write: Callable[[float], str]) -> str:
    """Format a number, NaN as a dash."""
    return NOT_KNOWN if math.isnan(value) else write(value)


SHOWN = {
    "run": lambda row: row.run,
    "status": lambda row: row.status,
    "N": lambda row: format_count(row.n_params, 3),
    "D": lambda row: format_count(row.train_tokens, 3),
    "epochs": lambda row: format_known(row.epochs, lambda epochs: format_digits(epochs, 2)),
    "FLOPs": lambda row: format_exponent(row.train_flops),
    "loss": lambda row: format_known(
        row.loss, lambda loss: format_loss(loss, None if math.isnan(row.loss_se) else row.loss_se)
    ),
    "time": lambda row: format_known(row.wall_s, format_duration),
    "note": lambda row: row.note,
}
TEXT_COLUMNS = ("run", "status", "note")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument
    paths = "a directory that contains runs/, or log files with --from"
    add("paths", type=Path, nargs="+", metavar="STUDY_DIR", help=paths)
    add("--out", type=Path, metavar="TABLE.csv", help="output file; default: STUDY_DIR/table.csv")
    add = parser.add_argument_group("published models beside a study").add_argument
    scores = "scores of published models, of evaluate_downstream.py or lm-eval; writes references.csv"
    add("--references", type=Path, nargs="+", metavar="SCORES", help=scores)
    facts = "columns model and n_params, train_tokens, note"
    add("--reference-facts", type=Path, metavar="FACTS.csv", help=facts)
    add = parser.add_argument_group("runs of other programs").add_argument
    add("--from", choices=KINDS, dest="kind", help="program that wrote the logs")
    values = f"values missing in the logs, for all runs: {', '.join(FACTS)}"
    add("--set", nargs="+", default=[], metavar="NAME=VALUE", help=values)
    add("--facts", type=Path, metavar="FACTS.csv", help="the same per run: a CSV with a column 'run'")
    names = "names of CSV columns, for example loss=val_loss"
    add("--map", nargs="+", default=[], metavar="OURS=THEIRS", help=names)
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments and check their combinations."""
    parser = build_parser()
    args = parser.parse_args(argv)
    is_study = args.kind is None
    if is_study and (len(args.paths) > 1 or args.set or args.facts or args.map):
        parser.error("several paths, --set, --facts and --map require --from")
    if not is_study and (args.references or args.out is None):
        parser.error("--from requires --out TABLE.csv, and no --references")
    if args.reference_facts and not args.references:
        parser.error("--reference-facts requires --references")
    return args


def parse_pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """Parse NAME=VALUE words. Raise ValueError for a word without '='."""
    for word in words:
        if "=" not in word:
            raise ValueError(f"{option}: got {word}, expected NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def collect_runs(args: argparse.Namespace) -> pd.DataFrame:
    """Return the table of a study, or of the logs of other programs."""
    if args.kind is None:
        return read_runs(args.paths[0])
    facts = read_facts(args.facts) if args.facts else {}
    # the empty name applies to all runs; --facts gives values of single runs
    facts[""] = {name: parse_fact(name, text) for name, text in parse_pairs(args.set, "--set").items()}
    return read_external_logs(args.paths, args.kind, facts, parse_pairs(args.map, "--map"))


def add_scores(args: argparse.Namespace, table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the table with the downstream scores of a study's runs, and a note for the user.

    The scores are also written to scores.csv, unless that file was written by another program.
    """
    if args.kind is not None or not len(scores := read_scores(args.paths[0], table)):
        return table, ""
    from megatron.report.study_data import SCORES  # imports scipy, which --help does not need

    path = args.paths[0] / SCORES
    if not write_scores(scores, path):
        note = f"\n{path}: not written by this tool, kept unchanged; move it away to write the new one\n"
        return add_score_columns(table, scores), note
    n_tasks, n_runs = scores["task"].nunique(), scores["run"].nunique()
    return add_score_columns(table, scores), f"\n{path}: {n_tasks} downstream tasks, {n_runs} runs\n"


def add_references(args: argparse.Namespace) -> str:
    """Write references.csv if --references is given; return a note for the user."""
    if not args.references:
        return ""
    facts = read_facts(args.reference_facts, "model", REFERENCE_FACTS) if args.reference_facts else {}
    references = read_references(args.references, facts)
    path = args.paths[0] / REFERENCES
    if not write_scores(references, path):
        raise ValueError(f"{path}: got other columns, expected the references' columns. Move the file away.")
    n_models = references["model"].nunique()
    return f"{path}: {n_models} published models, {len(references)} scores\n"


def score_study_forecasts(args: argparse.Namespace, table: pd.DataFrame) -> str:
    """Score the sealed forecasts of a study and write forecasts.csv; return a note for the user."""
    if args.kind is not None or not (args.paths[0] / FORECASTS).is_dir():
        return ""
    outcomes = score_forecasts(read_forecasts(args.paths[0]), table)
    path = write_forecast_table(outcomes, args.paths[0])
    return f"\n{path}: {len(outcomes)} sealed forecasts. {describe_calibration(outcomes)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Collect the rows, write the table and print it."""
    args = parse_args(argv)
    out = args.out or args.paths[0] / "table.csv"
    if out.suffix == ".parquet":
        raise ValueError(f"--out: got {out}, expected a .csv file. The parquet file is written beside it.")
    table, note = add_scores(args, collect_runs(args))
    note += add_references(args) + score_study_forecasts(args, table)
    write_table(table, out)
    write_table(table, out.with_suffix(".parquet"))
    rows = [[str(show(row)) for show in SHOWN.values()] for row in table.itertuples()]
    print_table(list(SHOWN), rows, TEXT_COLUMNS)
    for warning in table.attrs["warnings"]:
        print(f"warning: {warning}")
    print(note, end="")
    counts = Counter(table["status"])
    counted = join_list([f"{n} {status}" for status, n in counts.most_common()]) or "no runs"
    print(f"\n{out.with_suffix('.parquet')}: the same table\n{out}: {counted}")
    return 0


if __name__ == "__main__":
    run_main(main)
