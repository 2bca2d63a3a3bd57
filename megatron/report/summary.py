"""Summary of a study's results in sentences computed from its numbers. All functions return plain text."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.laws.forms import FORM
from megatron.report import blind_text, frontier_text, headlines, verdict
from megatron.report.figures.plot_law import (
    EXTRAPOLATION,
    OptimumPath,
    find_optimum_path,
    largest_compute,
    select_law_points,
    select_matching_runs,
)
from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.study.format import (
    OBJECTIVE_NAMES,
    format_count,
    format_digits,
    format_exponent,
    format_loss,
    format_plural,
    format_with_interval,
    join_list,
)
from megatron.study.proposal import make_timed_run, propose_runs

# Up to about 4 epochs a repeated token is worth nearly as much as a new one
# (Muennighoff et al. 2023, arXiv 2305.16264).
MAX_USEFUL_EPOCHS = 4


def format_study_title(study: Study) -> str:
    """Return the page's title: the study's name, or else its folder's name."""
    if study.name:
        return study.name[:1].upper() + study.name[1:]
    return study.folder.resolve().name.replace("_", " ").replace("-", " ").strip().capitalize() or "Study"


def describe_training(study: Study) -> str:
    """Return a sentence on the runs that were trained, and on those that are missing."""
    done, rows = study.finished_rows(), study.rows
    if not done:
        return (
            f"None of the {format_plural(len(rows), 'run')} of this study is finished yet."
            if rows
            else "No runs yet."
        )
    parts = []
    for objective in study.objectives():
        group = study.finished_rows(objective)
        if group:
            n_sizes = len({row.n_params for row in group})
            cells = {(row.n_params, row.train_tokens) for row in group}
            # a full grid has every size at every budget
            is_grid = len(cells) == n_sizes * len(study.budgets(group))
            parts.append(
                f"{len(group)} {OBJECTIVE_NAMES.get(objective, objective)} "
                f"({format_plural(n_sizes, 'size')}{' by' if is_grid else ','} "
                f"{format_plural(len(study.budgets(group)), 'token budget')})"
            )
    N, D = [row.n_params for row in done], [row.train_tokens for row in done]
    text = (
        f"{format_plural(len(done), 'transformer').capitalize()} {'of' if len(set(N)) < 2 else 'from'} "
        f"{_format_span(N)} parameters "
        f"{'was' if len(done) == 1 else 'were'} trained on {_format_span(D)} tokens: "
        f"{join_list(parts)}."
    )
    missing = len(rows) - len(done)
    if missing:
        text += (
            f" {missing} of {format_plural(len(rows), 'run')} {'is' if missing == 1 else 'are'} not "
            f"finished: shown up to {'its' if missing == 1 else 'their'} last step, and in no comparison."
        )
    return text


def _format_span(values: Sequence[float]) -> str:
    """Return '1.2M to 3.4M', or '1.2M' if both ends have the same text."""
    low, high = format_count(min(values)), format_count(max(values))
    return low if low == high else f"{low} to {high}"


def describe_text(study: Study) -> str:
    """Return sentences on the text, the reason for it, and its number of epochs."""
    corpus = study.corpus
    parts = []
    if corpus.get("corpus"):
        parts.append(
            f"The text is {_strip_full_stop(corpus['corpus'])}"
            + (f": {_strip_full_stop(corpus['why'])}." if corpus.get("why") else ".")
        )
    if corpus.get("added"):
        parts.append(_describe_added_text(corpus))
    if corpus.get("train_tokens"):
        parts.append(f"{format_count(corpus['train_tokens'])} tokens of it are for training.")
    scored = [row.n_tokens_scored for row in study.finished_rows() if row.n_tokens_scored]
    if scored:
        parts.append(f"Every loss is measured on {_format_span(scored)} held-out tokens.")
    epochs = max((row.epochs for row in study.finished_rows() if row.epochs), default=0)
    # 1.005 shows as 1.0 with two digits
    if epochs > 1.005:
        parts.append(f"The most repeated text was read {format_digits(epochs, 2)} times.")
    return " ".join(parts)


def _describe_added_text(corpus: dict[str, Any]) -> str:
    """Return a sentence on the text that was added to the corpus, and its share of all text."""
    n_documents, n_bytes = corpus.get("added_documents"), corpus.get("added_bytes")
    amount = ""
    if n_documents and n_bytes:
        amount = f" in {format_plural(int(n_documents), 'document')}, {format_count(n_bytes)} bytes"
        in_all = corpus.get("train_bytes", 0) + corpus.get("held_out_bytes", 0)
        if n_bytes <= in_all:
            amount += f" or {100 * n_bytes / in_all:.0f} % of all text"
    return f"Other text was added to it{amount}: {_strip_full_stop(corpus['added'])}."


def describe_best_run(study: Study) -> str:
    """Return sentences on the lowest loss in nats per token and bits per byte, and the runs in its noise."""
    done = study.finished_rows(AUTOREGRESSIVE) or study.finished_rows()
    if not done:
        return ""
    row = min(done, key=lambda row: row.loss)
    noise = headlines.collect_noise_floors(study)
    close = [other for other in done if other is not row and noise.margin(row, other) is not None]
    n_close = sum(not noise.is_lower(row, other) for other in close)
    runs = format_plural(n_close, "other run")
    tied = f" The losses of {runs} are not above it by more than the noise." if n_close else ""
    per_byte = study.corpus.get("bytes_per_token")
    # nats per token -> bits per byte
    # 3.5 nats per token at 4.2 bytes per token: 3.5 / 0.693 / 4.2 = 1.20 bits per byte, comparable between
    # tokenizers
    bits = f" ({row.loss / math.log(2) / per_byte:.2f} bits per byte)" if per_byte else ""
    loss = f"{format_loss(row.loss, row.loss_se)} nats per token{bits}"
    return (
        f"The lowest {headlines.name_loss(study, row)}, {loss}, is that of "
        f"{study.size_name(row.n_params)} parameters on {format_count(row.train_tokens)} tokens.{tied}"
    )


def list_doubts(study: Study) -> list[str]:
    """Return why the frontier and the parametric laws are not sound, and what to do, one sentence each.

    Empty if all are sound, or if the frontier has the answer and there is no parametric law.
    """
    words = [*frontier_text.list_frontier_doubts(study), *verdict.list_study_doubts(study)]
    if study.compute_law is None:
        words.append(explain_missing_law(study) if study.law is None else "")
        words.append(suggest_runs(study) if study.law is None or study.law.identified is False else "")
        words.append(verdict.suggest_other_form(study))
    return [line for line in words if line]


def explain_missing_law(study: Study) -> str:
    """Return a sentence on why the page shows no law."""
    n = len(study.finished_rows(AUTOREGRESSIVE))
    return (
        f"No law is shown: there is no usable law.json in this study. "
        f"{format_plural(n, 'autoregressive run')} "
        f"{'is' if n == 1 else 'are'} finished; L = E + A/N^α + B/D^β has five constants and requires many "
        "more runs than that, over several sizes and budgets. Fit it to the table with tools/fit_law.py."
    )


def describe_optima(study: Study) -> str:
    """Return sentences on the parametric law's optimum at the study's largest compute and beyond."""
    answered = frontier_text.has_answer(study)
    if study.law is None:
        return "No parametric form was fitted to these runs." if answered else ""
    if answered and not verdict.is_sound(study.law):
        return "The answer above is from the frontier and does not use a parametric form."
    if not verdict.is_sound(study.law):
        return f"No compute-optimal N and D are given: they would follow from {verdict.name_law(study.law)}."
    last = largest_compute(study)
    # index 0: the compute of the largest run, index 1: EXTRAPOLATION times that
    at = find_optimum_path(study.law, np.array([last, last * EXTRAPOLATION]))
    first, second = (_format_optimum(at, i) for i in range(2))
    # the sizes can miss the optimum even at a compute that was trained
    low, high = study.law.ranges["N"]
    outside = "" if low <= at.N[0] <= high else ", which is outside the sizes trained"
    level = f"{100 * (study.law.interval or {}).get('level', 0.95):.0f} %"
    return (
        f"With the compute of the largest run, {format_exponent(last)} FLOPs (C = 6 N D), the law puts the "
        f"lowest loss at {first}"
        f"{outside}. With {EXTRAPOLATION:.0f} times that compute it would be {second}. The second is an "
        f"extrapolation: its {level} confidence "
        "interval covers the scatter of the fit, not a change of the law beyond the runs."
    )


def suggest_runs(study: Study) -> str:
    """Return a sentence with the runs that would help most to identify the page's law; empty without any."""
    trained = [make_timed_run(row, row.N, row.D) for row in select_law_points(study)]
    if study.law is None:
        done = study.finished_rows(AUTOREGRESSIVE)
        trained = [make_timed_run(row, row.n_params, row.train_tokens) for row in done]
    proposal = propose_runs(study.law, trained)
    if proposal is None:
        return ""
    aim = "To identify it" if study.law is not None else "Towards a law"
    return f"{aim} train {proposal.describe()}."


def _format_optimum(at: OptimumPath, i: int) -> str:
    parts = []
    for letter, best, ends, unit in (("N", at.N, at.N_ends, "parameters"), ("D", at.D, at.D_ends, "tokens")):
        bounds = None if ends is None else [side[i] for side in ends]
        parts.append(f"{letter} = {format_with_interval(best[i], bounds, format_count)} {unit}")
    return " and ".join(parts)


def list_cautions(study: Study) -> list[str]:
    """Return caveats about the page, one sentence each."""
    words = list(study.faults)
    if study.law is not None:
        words += study.law.warnings or ()
        points = select_law_points(study)
        # runs that finished after the fit match its filter, except for conditions of --where
        finished = select_matching_runs(study) or points
        n_blind = sum(blind_text.is_blind_run(study, row) for row in finished)
        # the law may have been fitted with or without the blind run
        if finished and study.law.n_runs not in (len(finished), len(finished) - n_blind):
            words.append(
                f"The law was fitted on {format_plural(study.law.n_runs, 'run')}, and {len(finished)} are "
                "finished now: fit it again."
            )
        epochs = max((row.epochs or 0 for row in points), default=0)
        if epochs > MAX_USEFUL_EPOCHS and not FORM[study.law.form].needs_unique:
            words.append(
                f"The longest runs read the same text {format_digits(epochs, 2)} times. The law counts each "
                "repeated token as new, which is too optimistic beyond about 4 epochs."
            )
    if study.finished_rows(MASKED_DIFFUSION):
        words.append(
            "Masked-diffusion losses are upper bounds, so laws and gaps computed from them describe bounds."
        )
    statuses = {
        status: [row.run for row in study.rows if row.status == status] for status in ("failed", "preempted")
    }
    words += [
        f"{format_plural(len(runs), 'run')} {status}: {join_list(runs)}."
        for status, runs in statuses.items()
        if runs
    ]
    return words


def _strip_full_stop(text: str) -> str:
    """Return text without its final full stop, for use within a sentence."""
    return str(text).strip().rstrip(".")
