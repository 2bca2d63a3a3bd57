"""Tables of the page as plain text: optima, forecasts, crossings, laws, differences, models, runs, facts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from megatron.laws.downstream_curve import ANSWER_KINDS
from megatron.laws.law import Law
from megatron.report.answer import is_sound
from megatron.report.difference_text import HEADS, MAX_ROWS, describe_floor, format_cells
from megatron.report.study_data import Study
from megatron.study.differences import compare_best, estimate_noise_floors
from megatron.study.forecast import CROSSING
from megatron.study.format import (
    NOT_KNOWN,
    OBJECTIVE_NAMES,
    format_count,
    format_digits,
    format_duration,
    format_exponent,
    format_loss,
    format_ratio,
    format_with_interval,
)
from megatron.study.ladder import STUDY
from megatron.study.price import Tariff

MAX_TASKS = 6  # columns of the table of models
LEVEL_NOTE = "In brackets 95 % intervals: confidence of N and D, predictive for the loss of one new run."


@dataclass(frozen=True)
class Table:
    """A table of the page; the first cell of a row is its head."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def list_results(study: Study, optima: pd.DataFrame | None) -> list[Table]:
    """Return the tables of results that this study has data for."""
    tables = (
        tabulate_optima(study, optima),
        tabulate_forecasts(study),
        tabulate_crossings(study),
        tabulate_models(study),
    )
    return [table for table in tables if table is not None]


def tabulate_optima(study: Study, optima: pd.DataFrame | None) -> Table | None:
    """Return the best size, tokens and loss at the largest fitted budget and beyond."""
    if optima is None:
        return None
    heads = ["compute (FLOPs)", "times the largest", "parameters N", "tokens D", "nats per token"]
    factor, rows = study.bits_per_byte, []
    heads += ["bits per byte"] if factor else []
    for at in optima.to_dict("records"):
        name = "next: " if at["is_next"] else ""
        cells = [f"{name}{format_exponent(at['C'])}", format_ratio(at["times"])]
        for letter, write in (("N", format_count), ("D", format_count), ("loss", "{:.2f}".format)):
            cells.append(format_with_interval(at[letter], (at[f"{letter}_low"], at[f"{letter}_high"]), write))
        rows.append([*cells, f"{at['loss'] * factor:.3f}"] if factor else cells)
    return Table("Best use of the next budgets", heads, rows, [LEVEL_NOTE])


def tabulate_forecasts(study: Study) -> Table | None:
    """Return the forecasts and what was measured."""
    if not len(study.forecasts):
        return None
    heads = ["forecast", "predicted, 95 %", "measured", "error", "95 % interval", "stored"]
    rows = []
    for at in study.forecasts.itertuples():
        write = format_exponent if at.quantity == CROSSING else "{:.3f}".format
        measured, error, inside = NOT_KNOWN, NOT_KNOWN, "not measured"
        if pd.notna(at.observed):
            is_finite = math.isfinite(at.observed)
            measured = write(at.observed) if is_finite else "none"
            error = f"{100 * (at.observed / at.predicted - 1):+.1f} %" if is_finite else NOT_KNOWN
            inside = "inside" if at.low <= at.observed <= at.high else "outside"
            inside = "not counted: the run is older" if at.is_late else inside
        predicted = format_with_interval(at.predicted, (at.low, at.high), write)
        rows.append([at.name, predicted, measured, error, inside, f"{at.time}, {at.sha256[:12]}"])
    notes = [study.forecasts.attrs.get("calibration", "")]
    return Table("Forecasts of unseen runs", heads, rows, notes)


def tabulate_crossings(study: Study) -> Table | None:
    """Return the best losses of both objectives, and the compute of their crossing, by unique text."""
    if not study.crossings:
        return None
    heads = ["unique tokens", *(f"{name}, best loss" for name in OBJECTIVE_NAMES.values())]
    rows = []
    for at in study.crossings:
        best = (at.first, at.second)
        losses = [f"{format_loss(x.loss, x.seed_se)} at {format_exponent(x.C)}" for x in best]
        C = "not crossed"
        if at.C is not None:
            ends = [math.inf if end is None else end for end in at.interval or (None, None)]
            C = format_with_interval(at.C, ends, format_exponent)
        rows.append([format_count(at.U, 3), *losses, C])
    notes = ["Test loss in nats per token with the standard error of seeds, at FLOPs; crossing with 95 %."]
    return Table("Objectives on the same text", [*heads, "crossing (FLOPs)"], rows, notes)


def tabulate_models(study: Study) -> Table | None:
    """Return the scores of published models beside the study's largest scored run."""
    models = study.references
    models = models[~models["kind"].isin(ANSWER_KINDS)]
    if not len(models):
        return None
    tasks = list(dict.fromkeys(models["task"]))[:MAX_TASKS]
    ours = study.run_scores[study.run_scores["task"].isin(tasks)]
    ours = ours[ours["C"] == ours["C"].max()]
    ours = ours.assign(model="this study: " + ours["run"], note="")
    both = pd.concat([ours.reindex(columns=models.columns), models.sort_values("C")])
    rows = []
    for model, group in both.groupby("model", sort=False):
        N, D, C = group.iloc[0][["n_params", "train_tokens", "C"]]
        size = (format_count(N, 3), format_count(D, 3), format_exponent(C))
        scores = {at.task: format_loss(at.score, _drop_nan(at.se)) for at in group.itertuples()}
        rows.append([model, *size, *(scores.get(task, NOT_KNOWN) for task in tasks)])
    noted = models[models["note"] != ""].drop_duplicates(["model", "note"])
    notes = [f"{', '.join(group)}: {note}" for note, group in noted.groupby("note")["model"]]
    about = "Standard errors over the questions. Losses of other tokenizers are not comparable."
    return Table("Published models", ["model", "N", "D", "6 N D", *tasks], rows, [about, *notes])


def list_laws(study: Study) -> list[Table]:
    """Return the constants of the frontier and of the parametric laws, with their tests."""
    tables = []
    law = study.frontier
    if law is not None:
        rows = []
        for name, value in law.params.items():
            mark = law.not_identified.get(name, "")
            rows.append([name, format_with_interval(value, law.interval(name)), mark])
        note = f"{law.n_runs} runs at {law.n_budgets} budgets; scatter of a run {100 * law.spread:.2g} %."
        tables.append(_law_table("Frontier", rows, [note, _format_lack_of_fit(law.lack_of_fit)]))
    return tables + [_tabulate_law(objective, law) for objective, law in study.laws.items()]


def _tabulate_law(objective: str, law: Law) -> Table:
    """Return the constants of a parametric law."""
    frame, interval = law.to_frame(), law.interval or {}
    rows = []
    for at in frame.itertuples():
        value = format_with_interval(at.value, (at.low, at.high), "{:.3g}".format)
        # the head of the column says it once
        reason = law.not_identified.get(at.Index, "").removesuffix(": it is not identified.")
        rows.append([at.Index, value, reason])
    refits = f", {interval['n_bootstrap']} refits" if interval.get("n_bootstrap") else ""
    notes = [f"{law.n_runs} runs{refits}; scatter of a run {100 * law.spread:.2g} %."]
    notes += [law.formula()] if is_sound(law) else ["Do not quote these constants."]
    held_out = law.held_out.get("rms")
    notes += [f"Held-out runs: error {100 * held_out:.2g} %."] if isinstance(held_out, float) else []
    name = OBJECTIVE_NAMES.get(objective, objective)
    return _law_table(f"Law {law.form}, {name}", rows, [*notes, _format_lack_of_fit(law.lack_of_fit)])


def _law_table(title: str, rows: list[list[str]], notes: list[str]) -> Table:
    # a column without a mark is left out
    has_marks = any(row[2] for row in rows)
    heads = ["constant", "value, 95 %", *(["unknown because"] if has_marks else [])]
    return Table(title, heads, [row[: len(heads)] for row in rows], [note for note in notes if note])


def _format_lack_of_fit(test: dict[str, Any]) -> str:
    """Return the numbers of a lack-of-fit test."""
    if not test:
        return "The form is not tested: that needs runs of equal N and D that differ only in their seed."
    verdict = "passes" if test["passes"] else "fails"
    return (
        f"The form {verdict} its test: p = {test['p_value']:.2g}, noise of seeds "
        f"{100 * test['noise']:.2g} %, misfit {100 * test['misfit']:.2g} %."
    )


def list_differences(study: Study) -> list[Table]:
    """Return differences between runs with intervals.

    Empty without a noise floor or anything to compare.
    """
    rows = study.finished
    if not len(rows):
        return []
    floors = estimate_noise_floors(rows, study.laws)
    # the correction is for all pairs of a group, so showing fewer of them does
    # not change an interval
    groups = compare_best(rows, floors)
    best = [at for group in groups for at in group[:MAX_ROWS] if at.interval]
    if not best or not floors:
        return []
    cells = [format_cells(at) for at in best[:MAX_ROWS]]
    notes = [describe_floor(name, floor) for name, floor in floors.items()]
    return [Table("Lowest loss of each compute against the others", HEADS, cells, notes)]


def tabulate_runs(study: Study) -> Table:
    """Return all runs. A problem of a run stands in its last column."""
    heads = ["run", "N", "D", "epochs", "FLOPs", "loss", "time", "status"]
    rows = []
    for run in study.runs.itertuples():
        status = f"{run.status}, held out" if run.held_out == 1 else str(run.status)
        loss = NOT_KNOWN if math.isnan(run.loss) else format_loss(run.loss, _drop_nan(run.loss_se))
        cells = [format_count(run.n_params, 3), format_count(run.train_tokens, 3)]
        cells += [NOT_KNOWN if math.isnan(run.epochs) else format_digits(run.epochs, 2)]
        cells += [format_exponent(run.train_flops), loss, format_duration(_drop_nan(run.wall_s))]
        rows.append([run.run, *cells, ": ".join(filter(None, (status, run.note)))])
    return Table(f"All runs ({len(rows)})", heads, rows)


def _drop_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def list_facts(study: Study, tariff: Tariff | None = None) -> list[tuple[str, str]]:
    """Return (name, value) of the text, software, hardware, cost and seeds of the runs."""
    done, corpus = study.finished, study.corpus
    total = corpus.get("train_bytes", 0) + corpus.get("held_out_bytes", 0)
    share = f", {100 * corpus.get('added_bytes', 0) / total:.0f} % of all text" if total else ""
    facts = [
        ("text", str(corpus.get("corpus", ""))),
        ("added to it", f"{corpus['added']}{share}" if "added" in corpus else ""),
    ]
    held_out = corpus.get("held_out_tokens")
    facts.append(("held-out text", f"{format_count(held_out)} tokens" if held_out else ""))
    for name, key in (("hardware", "hardware"), ("torch", "torch"), ("code (git)", "git")):
        facts.append((name, _join_distinct(result.get(key) for result in study.results)))
    spent = f"{format_exponent(done['train_flops'].sum())} FLOPs" if len(done) else ""
    if (done["trunk"].fillna(done["run"]) != done["run"]).any():
        spent += ", shared steps counted in each run"
    facts += [("compute", spent), ("cost", describe_cost(study, tariff or Tariff()))]
    facts.append(("seeds", _join_distinct(f"{seed:g}" for seed in sorted(set(done["seed"].dropna())))))
    return [(name, value) for name, value in facts if value]


def describe_cost(study: Study, tariff: Tariff) -> str:
    """Return the device time, money and energy of the finished runs.

    Empty without a price or a power.
    """
    seconds, hardware = sum_device_seconds(map(dict, study.results))
    # a GPU that no option names is listed with its power limit
    return replace(tariff, hardware=hardware).describe(seconds) if seconds else ""


def sum_device_seconds(results: Iterable[dict[str, Any]]) -> tuple[float, str | None]:
    """Return (seconds times ranks of finished runs, their hardware); None for several kinds of hardware.

    `results` are contents of result.json. A branch counts the steps that it
    shares with its trunk.
    """
    timed = [result for result in results if isinstance(result.get("wall_s"), int | float)]
    names = {str(result.get("hardware")) for result in timed}
    seconds = sum(result["wall_s"] * (result.get("n_ranks") or 1) for result in timed)
    return seconds, names.pop() if len(names) == 1 else None


def _join_distinct(values: Iterable[Any]) -> str:
    """Return the distinct values, in order of their first occurrence."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def list_commands(study: Study) -> list[str]:
    """Return the commands that reproduce the study."""
    folder = study.folder
    lines = [f"python tools/collect.py {folder}"]
    if (folder / STUDY).is_file():
        lines.insert(0, f"python tools/sweep.py {folder}/{STUDY}  # trains the missing runs")
    lines += [f"scaling frontier {folder}"] if study.frontier is not None else []
    for objective, law in study.laws.items():
        name = "law" if law is study.law else f"law_{objective}"
        lines.append(
            f"python tools/fit_law.py {folder}/table.csv --objective {objective} --form {law.form} "
            f"--out {folder}/{name}.json"
        )
    return [*lines, f"python tools/make_report.py {folder}"]
