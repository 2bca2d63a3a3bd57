"""Published models beside a study: their compute, caveats, and the table of the page."""

import math
from collections.abc import Sequence
from typing import Any

from megatron.report.study_data import Study
from megatron.study.format import NOT_KNOWN, format_count, format_exponent
from megatron.study.references import ReferenceScore
from megatron.study.run_row import FinishedRow

MAX_TASKS = 6  # columns of the table


def count_flops(reference: ReferenceScore) -> float | None:
    """Return 6 N D, or None if N or D is unknown."""
    if not reference.n_params or not reference.train_tokens:
        return None
    return 6.0 * reference.n_params * reference.train_tokens


def count_run_flops(row: FinishedRow) -> float:
    """Return 6 N D of a run, the count that is used for published models too."""
    return 6.0 * row.n_params * row.train_tokens


def list_notes(references: Sequence[ReferenceScore]) -> list[str]:
    """Return the caveats of published models as sentences, each with its models."""
    models: dict[str, list[str]] = {}
    for reference in references:
        if reference.note and reference.model not in models.setdefault(reference.note, []):
            models[reference.note].append(reference.model)
    return [f"{', '.join(names)}: {note.rstrip('.')}." for note, names in models.items()]


def collect_references(study: Study) -> dict[str, Any]:
    """Return the table of published models and of the study's best run; {} without published models."""
    if not study.references:
        return {}
    tasks = list(dict.fromkeys(reference.task for reference in study.references))[:MAX_TASKS]
    models: dict[str, dict[str, ReferenceScore]] = {}
    for reference in study.references:
        models.setdefault(reference.model, {})[reference.task] = reference
    rows = []
    for model, scores in sorted(models.items(), key=lambda item: count_flops(_first(item[1])) or math.inf):
        about = _first(scores)
        cells = [_format_score(scores[t].score, scores[t].se) if t in scores else NOT_KNOWN for t in tasks]
        rows.append((model, *_format_size(about.n_params, about.train_tokens, count_flops(about)), *cells))
    if (row := _collect_largest_run(study, tasks)) is not None:
        rows.insert(0, row)
    return {
        "heads": ("model", "N", "D", "6 N D (FLOPs)", *tasks),
        "rows": rows,
        "notes": list_notes(study.references),
    }


def _collect_largest_run(study: Study, tasks: Sequence[str]) -> tuple[str, ...] | None:
    """Return the row of the scored run with the most compute."""
    scored = {(entry["run"], entry["task"]): entry for entry in study.scores}
    runs = [row for row in study.finished_rows() if any((row.run, task) in scored for task in tasks)]
    if not runs:
        return None
    row = max(runs, key=count_run_flops)
    entries = [scored.get((row.run, task)) for task in tasks]
    cells = [NOT_KNOWN if e is None else _format_score(e["score"], e.get("se")) for e in entries]
    size = _format_size(row.n_params, row.train_tokens, count_run_flops(row))
    return (f"this study: {row.run}", *size, *cells)


def _first(scores: dict[str, ReferenceScore]) -> ReferenceScore:
    return next(iter(scores.values()))


def _format_size(
    n_params: float | None, train_tokens: float | None, flops: float | None
) -> tuple[str, str, str]:
    return (
        format_count(n_params, 3) if n_params else NOT_KNOWN,
        format_count(train_tokens, 3) if train_tokens else NOT_KNOWN,
        format_exponent(flops) if flops else NOT_KNOWN,
    )


def _format_score(score: float, se: float | None) -> str:
    return f"{score:.3f}" if se is None or math.isnan(se) else f"{score:.3f} ± {se:.3f}"
