"""The blind check in words: a run predicted before it was trained, against what it measured.

Whether the run is inside its interval is computed here from the numbers that are printed, so that no sentence
can contradict them.
"""

import math
from typing import Any

from megatron.scaling import wording
from megatron.scaling.study import Study
from megatron.scaling.table import Row

HASH_DIGITS = 12
SAME = 1e-6  # relative difference of counts, or of predictions, that are the same


def is_measured(blind: Any) -> bool:
    """Whether the run was trained; its loss may be NaN or Inf."""
    return blind.measured is not None


def is_inside(blind: Any) -> bool | None:
    """Whether the measured loss is in the predictive interval; None before it is trained or without one."""
    if not is_measured(blind) or not all(map(math.isfinite, blind.interval)):
        return None
    return bool(blind.interval[0] <= blind.measured <= blind.interval[1])


def is_warning(blind: Any) -> bool:
    """Whether the check failed, or is none: outside of the interval, without one, or not predicted before."""
    return is_measured(blind) and not (is_inside(blind) and blind.in_time)


def title(blind: Any) -> str:
    """The check in one line: 'Blind run at 4.8e12 FLOPs: predicted ..., measured ..., inside'."""
    name = "Blind run" if blind.in_time or not is_measured(blind) else "Run that was not blind,"
    return f"{name} at {wording.exponent(blind.C)} FLOPs: {_numbers(blind)}{_verdict(blind)}"


def lead(blind: Any) -> str:
    """The first sentences of the box."""
    level = f"{100 * blind.level:.0f} % predictive interval"
    numbers = _numbers(blind, level)
    if not is_measured(blind):
        return f"Predicted, not yet measured: {numbers.removesuffix(', not yet measured')}."
    sentence = f"{numbers}{_verdict(blind)}."
    if not blind.in_time:
        late = "the prediction was not stored before the run was trained"
        return f"Not a blind check: {late}. {sentence[:1].upper()}{sentence[1:]}"
    inside = is_inside(blind)
    if inside is None:
        return f"Not decided: {sentence}"
    return f"{'Inside' if inside else 'Outside'}: {numbers}; error {_error(blind)}."


def record(study: Study) -> str:
    """Which run it is, and when the prediction was stored under which hash."""
    blind, law = study.blind, study.compute_law
    times = blind.C / law.C[1] if law is not None else math.nan
    beyond = f", {wording.times(times)} times the largest fitted budget" if times > 1.05 else ""
    words = (
        f"The run: {wording.count(blind.N)} parameters on {wording.count(blind.D)} tokens, "
        f"{wording.exponent(blind.C)} FLOPs{beyond}. Prediction stored {blind.predicted_at}, sha256 "
        f"{blind.sha256[:HASH_DIGITS]}."
    )
    return words + (" The law was fitted again since then." if is_refitted(study) else "")


def is_refitted(study: Study) -> bool:
    """Whether the study's law predicts another loss for this run than what was stored."""
    blind, law = study.blind, study.compute_law
    if law is None:
        return False
    try:
        again = law.predict_run(blind.N, blind.C).loss
    except (ValueError, OverflowError):
        return True
    return not abs(again / blind.predicted - 1) <= SAME


def is_blind_run(study: Study, row: Row) -> bool:
    """Whether a row of the table is the run of the blind check."""
    blind = study.blind
    if blind is None or not (row["n_params"] and row["train_tokens"]):
        return False
    pairs = ((row["n_params"], blind.N), (row["train_tokens"], blind.D))
    return all(abs(count / expected - 1) <= SAME for count, expected in pairs)


def _numbers(blind: Any, level: str = "") -> str:
    """'predicted 2.950 (2.880 to 3.020), measured 2.931'."""
    n = _decimals(blind)
    ends = wording.interval(blind.interval, lambda value: f"{value:.{n}f}") or "no interval"
    inside = f"{level} {ends}" if level and ends != "no interval" else ends
    measured = "not yet measured"
    if is_measured(blind):
        finite = math.isfinite(blind.measured)
        measured = f"measured {blind.measured:.{n}f}" if finite else "and the run has no finite loss"
    return f"predicted {blind.predicted:.{n}f} ({inside}), {measured}"


def _verdict(blind: Any) -> str:
    """', inside; error -0.64 %', as far as there is one."""
    if not is_measured(blind):
        return ""
    inside = is_inside(blind)
    word = "" if inside is None else ", inside" if inside else ", outside"
    return f"{word}; error {_error(blind)}"


def _error(blind: Any) -> str:
    error = 100 * (blind.measured / blind.predicted - 1)
    return f"{error:+.2f} %" if math.isfinite(error) else "not known"


def _decimals(blind: Any) -> int:
    """Three decimals, or as many more as tell the measured loss from the ends of the interval."""
    ends = [end for end in blind.interval if is_measured(blind) and end != blind.measured]
    for n in range(3, 7):
        if all(f"{end:.{n}f}" != f"{blind.measured:.{n}f}" for end in ends):
            return n
    return 6
