"""Every sentence about a frontier and its blind run is true of the table: random and adversarial studies.

The numbers in a title or sentence are computed again from the constants and the rows, by code that shares
nothing with frontier_text.py and plot_frontier.py.
"""

import contextlib
import functools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from megatron.laws.fitting.frontier_form import CONSTANTS
from megatron.report import report
from megatron.report.figures import plot_frontier
from megatron.report.study_data import Study
from tests.report.frontier_study import (
    ANSWER,
    BUDGETS,
    FLOPS,
    NUMBER,
    REJECTED,
    fit_rows,
    is_near,
    loss_at,
    make_blind,
    make_rows,
    make_study,
    size_at,
    strip_markup,
)


def check_growth(study: Study, way: str | None, power: str, low: str | None, high: str | None) -> None:
    law = study.compute_law
    i = CONSTANTS.index("size_exponent")
    value, half = law.params["size_exponent"], math.nan
    if law.covariance[i][i] >= 0:
        half = student.ppf(0.975, law.dof) * math.sqrt(law.covariance[i][i])
    assert law.identified and abs(float(power) - value) <= 0.00501
    assert way == ("grows" if value - half > 0 else "falls" if value + half < 0 else None)
    assert (low is None) == (half != half) or abs(half) < 0.006
    if low is not None:
        assert abs(float(low) - value + half) <= 0.00501 and abs(float(high) - value - half) <= 0.00501


def check_unidentified(study: Study, n: str) -> None:
    assert study.compute_law.not_identified
    assert int(n) in (study.compute_law.n_budgets, study.compute_law.n_runs)


def check_frontier(study: Study, C0: str, C1: str, N0: str, N1: str, L0: str, L1: str) -> None:
    law = study.compute_law
    C = [row.train_flops for row in study.rows]
    assert law.identified and is_near(C0, min(C)) and is_near(C1, max(C))
    for c, N, L in ((min(C), N0, L0), (max(C), N1, L1)):
        assert is_near(N, size_at(law, c)[0]) and is_near(L, loss_at(law, c)[0])


def check_blind(study: Study, name: str, C: str, predicted: str, ends: str, rest: str) -> None:
    blind = study.blind
    assert is_near(C, blind.C) and abs(float(predicted) - blind.predicted) <= 0.000501
    if ends != "no interval":
        assert np.allclose([float(end) for end in ends.split(" to ")], blind.interval, atol=0.000501)
    if blind.measured is None:
        assert rest == "not yet measured" and name == "Blind run"
        return
    assert (name == "Blind run") == blind.in_time
    inside = blind.interval[0] <= blind.measured <= blind.interval[1]
    is_known = not any(map(math.isnan, blind.interval))
    assert (", inside" in rest) == (is_known and inside) and (", outside" in rest) == (
        is_known and not inside
    )
    if math.isfinite(blind.measured):
        error = 100 * (blind.measured / blind.predicted - 1)
        assert abs(float(re.search(r"error ([-+][\d.]+) %", rest)[1]) - error) <= 0.00501
    else:
        assert "no finite loss" in rest and "error not known" in rest


SENTENCES = {
    r"By isoFLOP curves N\* (grows|falls) as C to the power (-?[\d.]+)(?: \((-?[\d.]+) to (-?[\d.]+)\))?":
        check_growth,
    r"IsoFLOP curves leave open whether N\* grows with C: power (-?[\d.]+)"
    r"(?: \((-?[\d.]+) to (-?[\d.]+)\))?": lambda study, *power: check_growth(study, None, *power),
    r"The isoFLOP curves of (\d+) budgets? do not identify the best size": check_unidentified,
    r"No compute-optimal size follows from a frontier that these runs do not identify \((\d+) runs\)":
        check_unidentified,
    rf"From {NUMBER} to {NUMBER} FLOPs the best N goes from {NUMBER} to {NUMBER} parameters, its loss from "
    rf"{NUMBER} to {NUMBER}": check_frontier,
    rf"(Blind run|Run that was not blind,) at {NUMBER} FLOPs: predicted {NUMBER} \((.*?)\), (.*)":
        check_blind,
}  # fmt: skip


def check_answer(study: Study, text: str) -> None:
    law = study.compute_law
    C, N, *_ = match = re.search(ANSWER, text).groups()
    C_true = 4 * max(row.train_flops for row in study.rows)
    size = size_at(law, C_true)
    assert is_near(C, C_true) and is_near(N, size[0]) and is_near(match[4], C_true / (FLOPS * size[0]))
    assert is_near(match[5], loss_at(law, C_true)[0])
    if size[1] == size[1]:
        assert is_near(match[2], size[1]) and is_near(match[3] or match[2], size[2])
        loss = loss_at(law, C_true)
        assert is_near(match[6], loss[1]) and is_near(match[7] or match[6], loss[2])
    else:
        assert match[2] is match[6] is None and "interval unknown" in text


@functools.cache
def random_study(seed: int) -> Study:
    """Return a study with random budgets, noise, sizes that may miss the best N, defects, blind run."""
    rng = np.random.default_rng(seed)
    C = BUDGETS[: rng.integers(4, 6)]
    shift, noise = rng.choice([1.0, 1.0, 1.0, 0.05, 20.0]), rng.choice([0.0005, 0.003, 0.01, 0.1])
    rows = make_rows(rng, C, shift, noise, int(rng.integers(1, 4)))
    law = fit_rows(rows)
    kind = rng.choice(["as fitted", "rejected", "no interval", "not identified", "runs not listed", "null"])
    if kind == "rejected":
        law = replace(law, lack_of_fit=REJECTED)
    elif kind == "null":
        law = replace(law, lack_of_fit=dict.fromkeys(REJECTED) | {"passes": False})
    elif kind == "no interval":
        law = replace(law, covariance=[[math.nan] * 7] * 7)
    elif kind == "not identified":
        name = str(rng.choice(CONSTANTS[3:]))
        law = replace(law, not_identified={name: f"{name} is open."})
    blind = None
    with contextlib.suppress(OverflowError):  # the optimum may overflow
        blind = make_blind(law, in_time=bool(rng.random() < 0.7)) if rng.random() < 0.7 else None
    if blind is not None:
        ends = [*blind.interval, blind.predicted, blind.predicted * 1.3, math.nan, None]
        blind = replace(blind, measured=ends[rng.integers(len(ends))])
        if blind.measured is None:
            blind = replace(blind, in_time=True)
    rows = [
        replace(row, status=str(rng.choice(["failed", "missing"])), loss=None) if rng.random() < 0.05 else row
        for row in rows
    ]
    return make_study(rows, law, blind)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 12)) for seed in range(40)]
)
def test_every_sentence_about_a_random_frontier_is_true_of_its_table(seed: int) -> None:
    study = random_study(seed)
    for make in (plot_frontier.blind_figure, plot_frontier.slices_figure, plot_frontier.frontier_figure):
        figure = make(study)
        if figure is None:
            assert make is plot_frontier.blind_figure and study.blind is None
            continue
        pairs = [(re.fullmatch(pattern, figure.title), check) for pattern, check in SENTENCES.items()]
        (matched,) = [(match, check) for match, check in pairs if match]
        matched[1](study, *matched[0].groups())
        assert figure.alt.startswith(figure.title.rstrip("."))
        assert not re.search(r"\b(nan|inf|None)\b", f"{figure.title} {figure.caption} {figure.alt}")
        colours = {f"slice{i}" for i in range(study.compute_law.n_budgets)} | {"muted", "accent", "ink"}
        assert {chip.colour for chip in figure.chips} <= {f"var(--{name})" for name in colours}
    text = strip_markup(report.render_summary(study))
    assert (re.search(ANSWER, text) is not None) == study.compute_law.identified
    if study.compute_law.identified:
        check_answer(study, text)
    else:
        assert (
            text.startswith("Not identified: these runs do not determine")
            and "N*, D* and L* are given" in text
        )
        assert "What to train next" not in text and "N ∝" not in text
    assert " nan" not in text


def test_the_random_studies_reach_every_sentence() -> None:
    titles = [
        figure.title
        for study in map(random_study, range(40))
        for make in (plot_frontier.blind_figure, plot_frontier.slices_figure, plot_frontier.frontier_figure)
        if (figure := make(study)) is not None
    ]
    for pattern in SENTENCES:
        assert any(re.fullmatch(pattern, title) for title in titles), pattern
