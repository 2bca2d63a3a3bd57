"""What a study found, in sentences made from its numbers. Everything here returns plain text, no markup."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.scaling import blind_words, frontier_words, headlines, verdict, wording
from megatron.scaling.forms import FORM
from megatron.scaling.plot_law import BEYOND, Optimum, largest_compute, law_points, optimum
from megatron.scaling.proposal import propose_runs
from megatron.scaling.study import AUTOREGRESSIVE, MASKED_DIFFUSION, Study

# Up to about here a repeated token is worth nearly a new one (Muennighoff et al. 2023, arXiv 2305.16264).
MANY_EPOCHS = 4


def title(study: Study) -> str:
    """The page's title: the study's name, by itself its folder's."""
    if study.name:
        return study.name[:1].upper() + study.name[1:]
    return study.folder.resolve().name.replace("_", " ").replace("-", " ").strip().capitalize() or "Study"


def trained(study: Study) -> str:
    """What was trained, and how much of it is there."""
    done, rows = study.done(), study.rows
    if not done:
        return (
            f"None of the {wording.plural(len(rows), 'run')} of this study is finished yet."
            if rows
            else "No runs yet."
        )
    parts = []
    for objective in study.objectives():
        mine = study.done(objective)
        if mine:
            n_sizes = len({row["n_params"] for row in mine})
            cells = {(row["n_params"], row["train_tokens"]) for row in mine}
            is_grid = len(cells) == n_sizes * len(study.budgets(mine))
            parts.append(
                f"{len(mine)} {wording.OBJECTIVES.get(objective, objective)} "
                f"({wording.plural(n_sizes, 'size')}{' by' if is_grid else ','} "
                f"{wording.plural(len(study.budgets(mine)), 'token budget')})"
            )
    N, D = ([row[name] for row in done] for name in ("n_params", "train_tokens"))
    text = (
        f"{wording.plural(len(done), 'transformer').capitalize()} {'of' if len(set(N)) < 2 else 'from'} "
        f"{_span(N)} parameters "
        f"{'was' if len(done) == 1 else 'were'} trained on {_span(D)} tokens: "
        f"{wording.listed(parts)}."
    )
    missing = len(rows) - len(done)
    if missing:
        text += (
            f" {missing} of {wording.plural(len(rows), 'run')} {'is' if missing == 1 else 'are'} not "
            f"finished: drawn as far as {'it' if missing == 1 else 'they'} got, and in no comparison."
        )
    return text


def _span(values: Sequence[float]) -> str:
    """'1.2M to 3.4M', or '1.2M' where both are written alike."""
    low, high = wording.count(min(values)), wording.count(max(values))
    return low if low == high else f"{low} to {high}"


def text_used(study: Study) -> str:
    """On which text, why that one, how often it was read."""
    corpus = study.corpus
    parts = []
    if corpus.get("corpus"):
        parts.append(
            f"The text is {_clause(corpus['corpus'])}"
            + (f": {_clause(corpus['why'])}." if corpus.get("why") else ".")
        )
    if corpus.get("added"):
        parts.append(_text_added(corpus))
    if corpus.get("train_tokens"):
        parts.append(f"{wording.count(corpus['train_tokens'])} tokens of it are for training.")
    scored = [row["n_tokens_scored"] for row in study.done() if row.get("n_tokens_scored")]
    if scored:
        parts.append(f"Every loss is measured on {_span(scored)} held-out tokens.")
    epochs = max((row["epochs"] for row in study.done() if row["epochs"]), default=0)
    if epochs > 1.005:
        parts.append(f"The most repeated text was read {wording.digits(epochs, 2)} times.")
    return " ".join(parts)


def _text_added(corpus: dict[str, Any]) -> str:
    """What was added to a corpus that held too little, and how much of all text that is."""
    n_documents, n_bytes = corpus.get("added_documents"), corpus.get("added_bytes")
    amount = ""
    if n_documents and n_bytes:
        amount = f" in {wording.plural(int(n_documents), 'document')}, {wording.count(n_bytes)} bytes"
        in_all = corpus.get("train_bytes", 0) + corpus.get("held_out_bytes", 0)
        if n_bytes <= in_all:
            amount += f" or {100 * n_bytes / in_all:.0f} % of all text"
    return f"Other text was added to it{amount}: {_clause(corpus['added'])}."


def best(study: Study) -> str:
    """The lowest loss, in nats and in bits a byte, and which runs are within its noise."""
    done = study.done(AUTOREGRESSIVE) or study.done()
    if not done:
        return ""
    row = min(done, key=lambda row: row["loss"])
    noise = headlines.noise_of(study)
    close = [other for other in done if other is not row and noise.margin(row, other) is not None]
    n_close = sum(not noise.is_lower(row, other) for other in close)
    runs = wording.plural(n_close, "other run")
    tied = f" The losses of {runs} are not above it by more than the noise." if n_close else ""
    per_byte = study.corpus.get("bytes_per_token")
    bits = f" ({row['loss'] / math.log(2) / per_byte:.2f} bits per byte)" if per_byte else ""
    loss = f"{wording.loss(row['loss'], row['loss_se'])} nats per token{bits}"
    return (
        f"The lowest {headlines.loss_name(study, row)}, {loss}, is that of "
        f"{study.size_name(row['n_params'])} parameters on {wording.count(row['train_tokens'])} tokens.{tied}"
    )


def doubts(study: Study) -> list[str]:
    """Why the frontier and the parametric laws may not be quoted, and what to do, one sentence each.

    Empty where all are sound, and where the frontier is the answer and there is no parametric law.
    """
    words = [*frontier_words.doubts(study), *verdict.first_lines(study)]
    if study.compute_law is None:
        words.append(law_absent(study) if study.law is None else "")
        words.append(to_do(study) if study.law is None or study.law.identified is False else "")
        words.append(verdict.other_form_words(study))
    return [line for line in words if line]


def law_absent(study: Study) -> str:
    """Why there is no law on this page."""
    n = len(study.done(AUTOREGRESSIVE))
    return (
        f"No law is shown: there is no usable law.json in this study. "
        f"{wording.plural(n, 'autoregressive run')} "
        f"{'is' if n == 1 else 'are'} finished; L = E + A/N^α + B/D^β has five constants and wants "
        "well more runs than "
        "that, over several sizes and budgets. tools/fit_law.py fits it from the table."
    )


def optima(study: Study) -> str:
    """What is compute-optimal at the study's largest compute and beyond, by the parametric law."""
    answered = frontier_words.is_answer(study)
    if study.law is None:
        return "No parametric form was fitted to these runs." if answered else ""
    if answered and not verdict.is_sound(study.law):
        return "The answer above is the frontier's: nothing in it follows from a parametric form."
    if not verdict.is_sound(study.law):
        return f"No compute-optimal N and D are given: they would follow from {verdict.law_words(study.law)}."
    last = largest_compute(study)
    at = optimum(study.law, np.array([last, last * BEYOND]))
    here, there = (_optimum_words(at, i) for i in range(2))
    low, high = study.law.ranges["N"]
    outside = "" if low <= at.N[0] <= high else ", which is itself outside the sizes trained"
    level = f"{100 * (study.law.interval or {}).get('level', 0.95):.0f} %"
    return (
        f"With the compute of the largest run, {wording.exponent(last)} FLOPs (C = 6 N D), the law puts the "
        f"lowest loss at {here}"
        f"{outside}. With {BEYOND:.0f} times that compute it would be {there}. The second is an "
        f"extrapolation: its {level} confidence "
        "interval covers the scatter of the fit, not the chance that the law bends beyond the runs."
    )


def to_do(study: Study) -> str:
    """The runs that would help most to identify the law of the page; empty where none can be proposed."""
    rows = law_points(study)
    if study.law is None:
        rows = [row | {"N": row["n_params"], "D": row["train_tokens"]} for row in study.done(AUTOREGRESSIVE)]
    proposal = propose_runs(study.law, rows)
    if proposal is None:
        return ""
    aim = "To identify it" if study.law is not None else "Towards a law"
    return f"{aim} train {proposal.words()}."


def _optimum_words(at: Optimum, i: int) -> str:
    ends = {"N": at.N_ends, "D": at.D_ends}
    parts = []
    for letter, unit in (("N", "parameters"), ("D", "tokens")):
        bounds = None if ends[letter] is None else [side[i] for side in ends[letter]]
        parts.append(
            f"{letter} = {wording.with_interval(getattr(at, letter)[i], bounds, wording.count)} {unit}"
        )
    return " and ".join(parts)


def cautions(study: Study) -> list[str]:
    """What a reader should know before believing the page, one sentence each."""
    words = list(study.faults)
    if study.law is not None:
        words += study.law.warnings or ()
        points = law_points(study)
        n_blind = sum(blind_words.is_blind_run(study, row) for row in points)
        if points and study.law.n_runs not in (len(points), len(points) - n_blind):
            words.append(
                f"The law was fitted on {wording.plural(study.law.n_runs, 'run')}, and {len(points)} are "
                "finished now: "
                "fit it again."
            )
        epochs = max((row["epochs"] or 0 for row in points), default=0)
        if epochs > MANY_EPOCHS and not FORM[study.law.form].wants_unique:
            words.append(
                f"The longest runs read the same text {wording.digits(epochs, 2)} times; the law counts each "
                "repeated token as "
                "a new one, which flatters it from about four times on."
            )
    if study.done(MASKED_DIFFUSION):
        words.append(
            "Masked-diffusion losses are upper bounds, so a law or a gap computed from them is one of bounds."
        )
    statuses = {
        status: [row["run"] for row in study.rows if row["status"] == status]
        for status in ("failed", "preempted")
    }
    words += [
        f"{wording.plural(len(runs), 'run')} {status}: {wording.listed(runs)}."
        for status, runs in statuses.items()
        if runs
    ]
    return words


def _clause(text: str) -> str:
    """Somebody's sentence, to go within another."""
    return str(text).strip().rstrip(".")
