"""Measure forecasts of published runs of more compute than the fitted ones.

    OMP_NUM_THREADS=1 python tools/bench/extrapolate.py
    OMP_NUM_THREADS=1 python tools/bench/extrapolate.py --choose 40
    OMP_NUM_THREADS=1 python tools/bench/extrapolate.py --surfaces
    python tools/bench/extrapolate.py mine.csv other.csv

Each ladder, points (C, L) of one recipe, is fitted without its last factor of 3, 10, 30 and 100 of compute.
The runs that are further than a third of the factor from the fit are scored, for the trend of `scaling
frontier` and two plain baselines: coverage of the 95 % interval with an interval that is clustered by source,
mean signed and absolute error, median half-width, mean interval score, and the share of forecasts that are
refused because they are wider than 10 %, which count in all other columns. --choose draws priors and scores
each source with the prior that the others choose. --surfaces holds out the tenth of the runs with the most
compute of each set, and predicts them by Chinchilla's form: plain, and with the error of extrapolation that
the other runs show (holdout.py).

Sets are read from the folder SCALING_LAWS, by default ../shared/laws; a set whose file is missing is skipped.
A TABLE.csv has columns train_flops, or n_params and train_tokens, loss and if present source and ladder.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from harness import write_results

from megatron.cli import create_parser, positive_int, run_main
from megatron.laws.distance import (
    BASELINES,
    Ladder,
    choose_without_each,
    draw_priors,
    forecast_by_trend,
    lower_envelope,
    score_ladders,
    split_ladders,
    summarise_scores,
)
from megatron.laws.holdout import score_largest

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "laws"


@dataclass(frozen=True)
class Published:
    """A published table: expressions of pandas for its compute, or its N and D, and its losses.

    source     formatted with the values of `by`: ladders of one source are dependent
    by         columns whose values separate ladders
    rows       condition of the rows to use
    is_ladder  whether every row is a run of the recipe; if not, the rows' lower envelope is the ladder
    """

    source: str
    files: tuple[str, ...]
    losses: tuple[str, ...]
    C: str = ""
    N: str = ""
    D: str = ""
    by: tuple[str, ...] = ()
    rows: str = ""
    is_ladder: bool = False


TEXTS = ("loss_c4_val", "loss_openlm", "loss_paloma_redpajama", "loss_paloma_falcon-refinedweb")
GADRE = Published("gadre {0}", ("gadre_openlm/gadre_openlm_104.csv",), TEXTS, "", "1.0 * N", "1.0 * D")
# N of experts and of parallel layers is in place of C: their runs have the same number of tokens
SETS = (
    Published("chinchilla", ("chinchilla_epoch/svg_extracted_data.csv",), ("loss",),
              N="1.0 * `Model Size`", D="`Training FLOP` / 6 / `Model Size`"),
    Published("datablations", ("datablations/datablations_all.csv",), ("val_loss",), N="1.0 * params",
              D="1.0 * tokens", rows="tokens <= 1.001 * unique_tokens"),
    replace(GADRE, by=("dataset_name",)),
    replace(GADRE, by=("dataset_name", "tok_mult"), is_ladder=True),
    Published("lr_bsz", ("scalebench/lr_bsz_train.parquet", "scalebench/lr_bsz_test.parquet"), ("lm_loss",),
              "6.0 * data_size * non_embedding_param_size"),
    Published("moe", ("scalebench/moe_train.parquet", "scalebench/moe_test.parquet"), ("loss_validation",),
              "1.0 * dense_parameter_count", by=("num_experts",)),
    Published("parallel", ("scalebench/parallel_train.parquet", "scalebench/parallel_test.parquet"),
              ("loss",), "1.0 * num_params", by=("parallel_size", "group"), is_ladder=True),
)  # fmt: skip


def read_tables(folder: Path) -> Iterator[tuple[Published, str, pd.DataFrame]]:
    """Yield each set with the name and the rows of each of its groups; print a line for each missing file."""
    for spec in SETS:
        paths = [folder / name for name in spec.files]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            print(f"skipped: {missing[0]}: no such file; set the folder with SCALING_LAWS")
            continue
        table = pd.concat([(pd.read_csv if p.suffix == ".csv" else pd.read_parquet)(p) for p in paths])
        table = table.query(spec.rows) if spec.rows else table
        for values, group in table.groupby(list(spec.by)) if spec.by else [((), table)]:
            yield replace(spec, source=spec.source.format(*values)), " ".join(map(str, values)), group


def read_ladders(folder: Path) -> Iterator[Ladder]:
    """Yield the ladders of all sets."""
    for spec, name, rows in read_tables(folder):
        C = rows.eval(spec.C or f"6 * ({spec.N}) * ({spec.D})").to_numpy(float)
        for loss in spec.losses:
            L = rows[loss].to_numpy(float)
            points = (C[np.isfinite(L)], L[np.isfinite(L)])
            order = np.argsort(points[0])
            C_of, L_of = (v[order] for v in points) if spec.is_ladder else lower_envelope(*points)
            yield Ladder(spec.source, f"{name} {loss}", C_of, L_of)


def measure_surfaces(folder: Path, share: float, n_bootstrap: int) -> pd.DataFrame:
    """Return the scores of each set of runs of any N and D, and their means."""
    tables = {}
    for spec, name, rows in read_tables(folder):
        for loss in spec.losses if spec.N and not spec.is_ladder else ():
            used = rows.dropna(subset=[loss])
            columns = [np.asarray(v, float) for v in (used.eval(spec.N), used.eval(spec.D), used[loss])]
            tables[f"{spec.source} {name} {loss}"] = score_largest(*columns, share, n_bootstrap)
    together = pd.concat(tables, names=["set", "method"])
    means = pd.concat({"mean": together.groupby("method").mean()}, names=["set", "method"])
    return pd.concat([together, means]).reset_index()


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("runs and fits").add_argument
    add(
        "tables", type=Path, nargs="*", metavar="TABLE.csv", help="tables of ladders; default: published ones"
    )
    draw = "draw N priors, and score each source by the one that the others choose"
    add("--choose", type=positive_int, metavar="N", help=draw)
    add("--surfaces", action="store_true", help="score laws of N and D")
    add("--share", type=float, default=0.1, metavar="SHARE", help="share of held-out runs of --surfaces")
    add("--n-bootstrap", type=positive_int, default=300, metavar="R", help="replicates of --surfaces")
    add("--json", type=Path, metavar="FILE", help="also write the table to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the scores by distance of all ladders, or those of laws of N and D."""
    args = build_parser().parse_args(argv)
    folder = Path(os.environ.get("SCALING_LAWS", FOLDER))
    if args.surfaces:
        table = measure_surfaces(folder, args.share, args.n_bootstrap)
    else:
        given = [ladder for path in args.tables for ladder in split_ladders(pd.read_csv(path))]
        ladders = given or list(read_ladders(folder))
        scores = score_ladders(ladders, {"trend": forecast_by_trend(), **BASELINES})
        if args.choose:
            trend, chosen = choose_without_each(ladders, draw_priors(args.choose))
            scores = pd.concat([trend, scores[scores["method"] != "trend"]])
            print("\n".join(f"without {source}: {prior}" for source, prior in chosen.items()))
        table = summarise_scores(scores)
    print(table.to_string(index=False, float_format="{:.3f}".format))
    write_results(args.json, table.to_dict("list"))
    return 0


if __name__ == "__main__":
    run_main(main)
