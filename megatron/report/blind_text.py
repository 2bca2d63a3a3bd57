"""Sentences about the blind check: a run predicted before training, compared with its measured loss.

Whether the run is inside its interval is computed in this module from the numbers that are printed, so that
no sentence can contradict them.
"""

import math

from megatron.report.study_data import Study
from megatron.study.blind import BlindOutcome
from megatron.study.format import format_count, format_exponent, format_interval, format_ratio
from megatron.study.run_row import FinishedRow

HASH_DIGITS = 12
SAME_TOLERANCE = 1e-6  # relative difference below which counts or predictions are equal


def is_measured(blind: BlindOutcome) -> bool:
    """Return whether the run was trained; its loss may be NaN or Inf."""
    return blind.measured is not None


def is_inside(blind: BlindOutcome) -> bool | None:
    """Return whether the measured loss is in the predictive interval; None without a loss or an interval."""
    if blind.measured is None or not all(map(math.isfinite, blind.interval)):
        return None
    return bool(blind.interval[0] <= blind.measured <= blind.interval[1])


def is_warning(blind: BlindOutcome) -> bool:
    """Return whether the check failed or is invalid: outside the interval, no interval, or predicted late."""
    # an interval that is not finite gives None, which counts as a warning too
    return is_measured(blind) and not (is_inside(blind) and blind.in_time)


def format_blind_title(blind: BlindOutcome) -> str:
    """Return the check in one line: 'Blind run at 4.8e12 FLOPs: predicted ..., measured ..., inside'."""
    name = "Blind run" if blind.in_time or not is_measured(blind) else "Run that was not blind,"
    return f"{name} at {format_exponent(blind.C)} FLOPs: {_format_numbers(blind)}{_format_verdict(blind)}"


def format_blind_lead(blind: BlindOutcome) -> str:
    """Return the first sentences of the box."""
    level = f"{100 * blind.level:.0f} % predictive interval"
    numbers = _format_numbers(blind, level)
    if not is_measured(blind):
        return f"Predicted, not yet measured: {numbers.removesuffix(', not yet measured')}."
    sentence = f"{numbers}{_format_verdict(blind)}."
    if not blind.in_time:
        late = "the prediction was not stored before the run was trained"
        return f"Not a blind check: {late}. {sentence[:1].upper()}{sentence[1:]}"
    inside = is_inside(blind)
    if inside is None:
        return f"Not decided: {sentence}"
    return f"{'Inside' if inside else 'Outside'}: {numbers}; error {_format_error(blind)}."


def describe_record(study: Study) -> str:
    """Return the size of the run, and the time and hash of the stored prediction; empty without one."""
    blind, law = study.blind, study.compute_law
    if blind is None:
        return ""
    times = blind.C / law.C[1] if law is not None else math.nan
    # 1.05 allows for the rounding of budgets to whole steps
    beyond = f", {format_ratio(times)} times the largest fitted budget" if times > 1.05 else ""
    words = (
        f"The run: {format_count(blind.N)} parameters on {format_count(blind.D)} tokens, "
        f"{format_exponent(blind.C)} FLOPs{beyond}. Prediction stored {blind.predicted_at}, sha256 "
        f"{blind.sha256[:HASH_DIGITS]}."
    )
    return words + (" The law has been refitted since." if is_refitted(study) else "")


def is_refitted(study: Study) -> bool:
    """Return whether the study's law predicts a different loss for this run than the stored one."""
    blind, law = study.blind, study.compute_law
    if blind is None or law is None:
        return False
    try:
        again = law.predict_run(blind.N, blind.C).loss
    except (ValueError, OverflowError):
        return True
    # `not <=` instead of `>`: a NaN counts as refitted
    return not abs(again / blind.predicted - 1) <= SAME_TOLERANCE


def is_blind_run(study: Study, row: FinishedRow) -> bool:
    """Return whether a row of the table is the run of the blind check."""
    blind = study.blind
    if blind is None or not (row.n_params and row.train_tokens):
        return False
    pairs = ((row.n_params, blind.N), (row.train_tokens, blind.D))
    return all(abs(count / expected - 1) <= SAME_TOLERANCE for count, expected in pairs)


def _format_numbers(blind: BlindOutcome, level: str = "") -> str:
    """Return 'predicted 2.950 (2.880 to 3.020), measured 2.931'."""
    n = _choose_decimals(blind)
    ends = format_interval(blind.interval, lambda value: f"{value:.{n}f}") or "no interval"
    inside = f"{level} {ends}" if level and ends != "no interval" else ends
    measured = "not yet measured"
    if blind.measured is not None:
        finite = math.isfinite(blind.measured)
        measured = f"measured {blind.measured:.{n}f}" if finite else "and the run has no finite loss"
    return f"predicted {blind.predicted:.{n}f} ({inside}), {measured}"


def _format_verdict(blind: BlindOutcome) -> str:
    """Return ', inside; error -0.64 %', or the parts of it that exist."""
    if not is_measured(blind):
        return ""
    inside = is_inside(blind)
    word = "" if inside is None else ", inside" if inside else ", outside"
    return f"{word}; error {_format_error(blind)}"


def _format_error(blind: BlindOutcome) -> str:
    if blind.measured is None:
        return "not known"
    error = 100 * (blind.measured / blind.predicted - 1)
    return f"{error:+.2f} %" if math.isfinite(error) else "not known"


def _choose_decimals(blind: BlindOutcome) -> int:
    """Return the number of decimals, 3 to 6, that separates the measured loss from the interval's ends."""
    # with 3 decimals 3.1000 and 3.1001 would both read 3.100 and hide whether the loss is inside
    # an end that equals the measured loss cannot be separated from it by any number of decimals
    ends = [end for end in blind.interval if is_measured(blind) and end != blind.measured]
    for n in range(3, 7):
        if all(f"{end:.{n}f}" != f"{blind.measured:.{n}f}" for end in ends):
            return n
    return 6
