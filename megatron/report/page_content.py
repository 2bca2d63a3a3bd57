"""Content of a report page as plain text and numbers, which the templates turn into HTML."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.laws.compute_law import Optimum
from megatron.laws.law import Law
from megatron.report import blind_text, frontier_text, headlines, summary, verdict
from megatron.report.figures.plot import size_colour
from megatron.report.reference_text import collect_references
from megatron.report.study_data import AUTOREGRESSIVE, Study
from megatron.study.forecast import CROSSING, LEVELS, ForecastOutcome, calibrate
from megatron.study.format import (
    NOT_KNOWN,
    OBJECTIVE_NAMES,
    format_constant,
    format_count,
    format_digits,
    format_duration,
    format_exponent,
    format_interval,
    format_loss,
    format_plural,
)
from megatron.study.ladder import STUDY
from megatron.study.run_row import RunRow
from megatron.study.tariff import Tariff, fill_watts, sum_device_seconds

GREEK = {"alpha": "α", "beta": "β", "gamma": "γ"}


def collect_summary(study: Study) -> dict[str, Any]:
    """Return the content of summary.html: the blind check, the answer, the runs, the laws and caveats."""
    laws = list(study.laws.values()) or ([study.law] if study.law is not None else [])
    describe = (summary.describe_training, summary.describe_text, summary.describe_best_run)
    return {
        "blind": collect_blind(study),
        "answer": collect_answer(study),
        "trained": " ".join(filter(None, (sentence(study) for sentence in describe))),
        "doubts": summary.list_doubts(study),
        "laws": [collect_law(law) for law in laws],
        "optima": summary.describe_optima(study),
        "tiles": list_tiles(study),
    }


def collect_sections(study: Study, tariff: Tariff | None = None) -> dict[str, Any]:
    """Return the content after the figures, except the differences."""
    return {
        "cautions": summary.list_cautions(study),
        "forecasts": collect_forecasts(study),
        "references": collect_references(study),
        "runs": [collect_run(study, row) for row in study.rows],
        "commands": list_commands(study),
        "facts": list_facts(study, tariff),
    }


def collect_blind(study: Study) -> dict[str, Any]:
    """Return predicted and measured loss as sentences; {} without a blind check."""
    if study.blind is None:
        return {}
    return {
        "is_warning": blind_text.is_warning(study.blind),
        "lead": blind_text.format_blind_lead(study.blind),
        "record": blind_text.describe_record(study),
    }


def collect_forecasts(study: Study) -> dict[str, Any]:
    """Return the sealed forecasts as a table, with their calibration; {} without forecasts."""
    if not study.forecasts:
        return {}
    late = sum(outcome.in_order is False for outcome in study.forecasts)
    notes = [calibrate(study.forecasts).sentence]
    if late:
        notes.append(f"{format_plural(late, 'forecast')} not counted: files of the run are older.")
    return {
        "heads": [
            "forecast",
            "predicted",
            *(f"{100 * level:g} %" for level in LEVELS),
            "measured",
            "inside",
            "sealed",
        ],
        "rows": [_collect_forecast(outcome) for outcome in study.forecasts],
        "notes": notes,
    }


def _collect_forecast(outcome: ForecastOutcome) -> list[str]:
    forecast = outcome.forecast
    write = format_exponent if forecast.quantity == CROSSING else "{:.3f}".format
    measured = NOT_KNOWN
    if outcome.measured is not None:
        finite = math.isfinite(outcome.measured)
        measured = (
            write(outcome.measured) if finite else "no crossing" if outcome.measured > 0 else "not finite"
        )
    inside = [f"{100 * level:g} %" for level in LEVELS if outcome.inside(level)]
    verdict_words = "not scored" if not outcome.is_scored else ", ".join(inside) or "none"
    ends = [format_interval(forecast.interval(level), write) for level in LEVELS]
    stored = f"{forecast.created_at:%Y-%m-%d %H:%M} UTC, {forecast.sha256()[:12]}"
    return [forecast.name, write(forecast.predicted), *ends, measured, verdict_words, stored]


def collect_answer(study: Study) -> dict[str, Any]:
    """Return the best N, D and loss at the next budgets; {} without an answer."""
    law, answers = study.compute_law, frontier_text.list_answers(study)
    if law is None or not answers:
        return {}
    # the lead is the answer at NEXT_FACTOR; the last one if that optimum overflows
    chosen = next((at for times, at in answers if times == frontier_text.NEXT_FACTOR), answers[-1][1])
    fitted = f"{format_plural(law.n_runs, 'run')} of {format_plural(law.n_budgets, 'budget')}"
    note = (
        f"In brackets 95 % intervals: confidence of N* and D*, predictive (nats per token) "
        f"for the measured loss of one new run. Fitted on {fitted} from {format_exponent(law.C[0])} to "
        f"{format_exponent(law.C[1])} FLOPs."
    )
    if law.lack_of_fit.get("passes", False):
        note += f" Its form {frontier_text.describe_frontier_misfit(law)}."
    return {
        "cautions": frontier_text.list_frontier_cautions(study),
        "lead": frontier_text.describe_optimum(chosen),
        "rows": [_collect_optimum(times, at) for times, at in answers],
        "note": note,
    }


def _collect_optimum(times: float, at: Optimum) -> dict[str, Any]:
    cells = (
        (format_count(at.N), format_interval(at.N_interval, format_count)),
        (format_count(at.D), format_interval(at.D_interval, format_count)),
        (f"{at.loss:.2f}", format_interval(at.predictive, "{:.2f}".format)),
    )
    return {
        "flops": format_exponent(at.C),
        "distance": "largest fitted" if times == 1 else f"{times:g} times the largest",
        "cells": [(value, f"({inside})" if inside else "interval unknown") for value, inside in cells],
    }


def collect_law(law: Law) -> dict[str, Any]:
    """Return a law's formula, its constants with intervals, and a note."""
    interval = law.interval or {}
    constants = []
    for name, value in law.params.items():
        inside = format_interval((interval.get("params") or {}).get(name), format_constant)
        shown = "not identified" if name in law.not_identified else format_constant(value)
        constants.append((GREEK.get(name, name), shown + (f" ({inside})" if inside else "")))
    words = f"{format_plural(law.n_runs, 'run')}"
    if interval.get("n_bootstrap"):
        percent = f"{100 * interval.get('level', 0.95):.0f} %"
        words += f"; in brackets {percent} confidence intervals, {interval.get('method', '')}"
    objective = OBJECTIVE_NAMES.get((law.filter or {}).get("objective", ""), "")
    is_sound = verdict.is_sound(law)
    warning = "" if is_sound else f"This is {verdict.name_law(law)}: do not quote it. "
    return {
        "is_sound": is_sound,
        "formula": verdict.format_symbolic(law) if law.identified is False else law.formula(),
        "constants": constants,
        "note": f"{warning}Held-out loss of the {objective} models, N parameters, D tokens. "
        f"Fitted on {words}. {verdict.describe_fit(law)}",
    }


def list_tiles(study: Study) -> list[tuple[str, str]]:
    """Return (value, label) of four key numbers of the study."""
    done = study.finished_rows()
    tiles = [(f"{len(done)} of {len(study.rows)}", "runs finished")]
    scored = study.finished_rows(AUTOREGRESSIVE) or done
    if scored:
        row = min(scored, key=lambda row: row.loss)
        size = study.size_name(row.n_params)
        label = f"lowest {headlines.name_loss(study, row)}, nats per token ({size})"
        tiles.append((format_loss(row.loss), label))
    tiles += _list_law_tiles(study)
    if done:
        spent = sum(row.train_flops or 0 for row in done)
        seconds = sum(row.wall_s or 0 for row in done)
        # steps shared with a trunk are counted in each branch, so the sum exceeds the compute spent
        branched = any(row.is_branch for row in done)
        what = "trained, shared steps counted in each run" if branched else "spent on training"
        tiles.append((f"{format_exponent(spent)} FLOPs", f"{what}, {format_duration(seconds)} in all"))
    return tiles


def _list_law_tiles(study: Study) -> list[tuple[str, str]]:
    """Return a tile with the growth of the compute-optimal size, or one that states that it is unknown."""
    law, frontier = study.law, study.compute_law
    ends: Sequence[float] | None
    if frontier is not None and frontier_text.has_answer(study):
        value, ends = frontier.params["size_exponent"], frontier.interval("size_exponent")
    elif frontier is not None and (law is None or not verdict.is_sound(law)):
        return [("no law", "but a frontier that these runs do not identify")]
    elif law is None:
        return []
    elif not verdict.is_sound(law):
        return [("no law", f"but {verdict.name_law(law)}")]
    elif law.derived.get("a_exponent") is None:
        return []
    else:
        value, ends = law.derived["a_exponent"], ((law.interval or {}).get("derived") or {}).get("a_exponent")
    inside = format_interval(ends, "{:.2f}".format)
    return [(f"N ∝ C^{value:.2f}", f"compute-optimal size{f' ({inside})' if inside else ''}")]


def collect_run(study: Study, row: RunRow) -> dict[str, Any]:
    """Return one row of the table of runs."""
    return {
        "colour": size_colour(study, row),
        "name": row.run,
        "size": row.size or NOT_KNOWN,
        "cells": (
            format_count(row.n_params, 3),
            format_count(row.train_tokens, 3),
            NOT_KNOWN if row.epochs is None else format_digits(row.epochs, 2),
            format_exponent(row.train_flops),
            format_loss(row.loss, row.loss_se),
            format_duration(row.wall_s),
        ),
        "status": row.status,
        "held_out": bool(row.held_out),
        "note": row.note,
    }


def list_commands(study: Study) -> list[str]:
    """Return the commands that reproduce the study."""
    folder = study.folder
    study_file = f"{folder}/{STUDY}" if (folder / STUDY).is_file() else "STUDY.yaml"
    fits = [
        f"python tools/fit_law.py {folder}/table.csv --objective {objective} --form {law.form} "
        f"--out {folder}/{'law' if law is study.law else f'law_{objective}'}.json"
        for objective, law in study.laws.items()
    ]
    return [
        f"python tools/sweep.py {study_file}  # trains the missing runs",
        f"python tools/collect.py {folder}",
        *(fits or [f"python tools/fit_law.py {folder}/table.csv --out {folder}/law.json"]),
        f"python tools/make_report.py {folder}",
    ]


def list_facts(study: Study, tariff: Tariff | None = None) -> list[tuple[str, str]]:
    """Return (name, value) of the software, hardware, cost and seeds of the runs."""
    done = study.finished_rows()
    facts = [
        (name, _join_distinct(result.get(key) for result in study.results))
        for name, key in (("hardware", "hardware"), ("torch", "torch"), ("code (git)", "git"))
    ]
    facts.append(("cost", describe_cost(study, tariff or Tariff())))
    facts.append(("seeds", _join_distinct(row.seed for row in done)))
    facts.append(("sequence length", _join_distinct(row.seq_len for row in done)))
    if study.law is not None:
        facts.append(("table fitted, sha256", (study.law.table or {}).get("sha256", "")))
    return [(name, value) for name, value in facts if value]


def describe_cost(study: Study, tariff: Tariff) -> str:
    """Return the device time, money and energy of the finished runs; empty without a price or a power."""
    seconds, hardware = sum_device_seconds(study.results)
    tariff = fill_watts(tariff, hardware)
    if not tariff.is_known or not seconds:
        return ""
    # a GPU that no option names is listed with its power limit
    text = tariff.describe(seconds, "device" if (hardware or "CPU").startswith("CPU") else "GPU")
    branched = any(row.trunk not in (None, "", row.run) for row in study.finished_rows())
    return f"{text}{', shared steps counted in each run' if branched else ''}"


def _join_distinct(values: Iterable[Any]) -> str:
    """Return the distinct values, in order of their first occurrence."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))
