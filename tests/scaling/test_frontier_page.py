"""The page of a study whose answer is the frontier: blind check, answer, and headlines that are true.

What a title or a sentence states is computed again from the constants and the rows, by code that shares
nothing with frontier_words.py and plot_frontier.py.
"""

import contextlib
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student

from megatron.scaling import blind_words, frontier_words, plot_frontier, report
from megatron.scaling.compute_law import CONSTANTS, ComputeLaw, fit_compute_law
from megatron.scaling.law import Law
from megatron.scaling.study import NO_CURVE, Study
from megatron.scaling.table import COLUMNS

AR = "autoregressive"
FLOPS = 6.6  # a parameter and token
NUMBER = r"(-?[\d.,]+(?:e-?\d+)?[kMBT]?)"
UNIT = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
BUDGETS = np.geomspace(1e11, 3.2e12, 5)
REJECTED = {"statistic": 31.0, "p_value": 1e-4, "dof": [10, 4], "noise": 0.004, "misfit": 0.021,
            "passes": False}  # fmt: skip


@dataclass(frozen=True)
class Blind:
    """The fields of a blind check that a page reads."""

    C: float
    N: float
    D: float
    predicted: float
    interval: tuple[float, float]
    measured: float | None = None
    in_time: bool = True
    level: float = 0.95
    size: str = "340k"
    predicted_at: str = "2026-11-22 11:40:03 UTC"
    sha256: str = "0a1b2c3d4e5f" + "0" * 52


def number(text: str) -> float:
    text = text.replace(",", "").rstrip(".")
    return float(text[:-1]) * UNIT[text[-1]] if text[-1] in UNIT else float(text)


def near(text: str, value: float, relative: float = 0.051) -> bool:
    """Whether a number as written is this one: two significant digits, or two decimals."""
    return abs(number(text) - value) <= max(relative * abs(value), 0.00501)


def rows_of(
    rng: np.random.Generator,
    C: np.ndarray = BUDGETS,
    shift: float = 1.0,
    noise: float = 0.003,
    n_seeds: int = 1,
) -> list[dict]:
    """IsoFLOP runs around `shift` times the best N of each budget."""
    rows: list[dict] = []
    for budget in C:
        for times in (0.3, 0.55, 1.0, 1.8, 3.3):
            N = int(40_000 * (budget / 2e11) ** 0.5 * times * shift)
            bend = math.log(0.5 * math.exp(-0.2 * math.log(times * shift)) + 0.5 * (times * shift) ** 0.2)
            for seed in range(n_seeds if times == 1.0 else 1):
                L = 3.9 * (budget / 2e11) ** -0.085 * math.exp(bend + noise * rng.normal())
                D = int(budget / (FLOPS * N))
                rows.append(
                    dict.fromkeys(COLUMNS)
                    | {
                        "run": f"run{len(rows)}", "identity": f"id{len(rows)}", "status": "done",
                        "objective": AR, "size": "s", "seed": seed, "n_params": N, "train_tokens": D,
                        "n_non_embedding": N // 2, "unique_tokens": D, "epochs": 1.0, "loss": L,
                        "train_flops": float(budget), "flops_6nd": 6.0 * N * D, "seq_len": 256,
                        "loss_se": 0.004, "n_tokens_scored": 200_000, "wall_s": budget / 2e10, "note": "",
                    }
                )  # fmt: skip
    return rows


def fit(rows: list[dict]) -> ComputeLaw:
    names = ("n_params", "train_tokens", "loss", "train_flops")
    N, D, L, C = (np.array([row[name] for row in rows], dtype=float) for name in names)
    return fit_compute_law(N, D, L, C, [row["run"] for row in rows])


def study_of(rows: list[dict], law: ComputeLaw | None, blind: Blind | None = None, **more: object) -> Study:
    curves = {row["run"]: NO_CURVE for row in rows}
    return Study(Path("s"), rows, curves, None, {}, compute_law=law, blind=blind, **more)


def blind_of(law: ComputeLaw, **changes: object) -> Blind:
    at = law.optimum(4 * law.C[1])
    prediction = law.predict_run(at.N, at.C)
    return replace(Blind(at.C, at.N, at.D, prediction.loss, prediction.predictive), **changes)


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return rows_of(np.random.default_rng(1), n_seeds=3)


@pytest.fixture(scope="module")
def law(rows: list[dict]) -> ComputeLaw:
    return fit(rows)


def plain(markup: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", markup.replace("&nbsp;", " "))).strip()


# ------------------------------------------------------------------------------------------ checkers


def size_at(law: ComputeLaw, C: float) -> tuple[float, float, float]:
    """Best N at C and the ends of its 95 % interval, from the constants and their covariance."""
    x, p, S = math.log(C / law.centre), law.params, np.array(law.covariance)
    variance = S[3, 3] + 2 * x * S[3, 4] + x * x * S[4, 4]
    half = student.ppf(0.975, law.dof) * math.sqrt(variance) if variance >= 0 else math.nan
    centre = p["log_size"] + p["size_exponent"] * x
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def loss_at(law: ComputeLaw, C: float) -> tuple[float, float, float]:
    """L* at C with the ends of the predictive interval of one new run."""
    x, p, S = math.log(C / law.centre), law.params, np.array(law.covariance)[:3, :3]
    g = np.array([1.0, -x, x * x / 2])
    half = student.ppf(0.975, law.dof) * math.sqrt(g @ S @ g + law.spread**2)
    centre = p["log_loss"] - p["slope"] * x + p["curvature"] * x * x / 2
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


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
    C = [row["train_flops"] for row in study.rows]
    assert law.identified and near(C0, min(C)) and near(C1, max(C))
    for c, N, L in ((min(C), N0, L0), (max(C), N1, L1)):
        assert near(N, size_at(law, c)[0]) and near(L, loss_at(law, c)[0])


def check_blind(study: Study, name: str, C: str, predicted: str, ends: str, rest: str) -> None:
    blind = study.blind
    assert near(C, blind.C) and abs(float(predicted) - blind.predicted) <= 0.000501
    if ends != "no interval":
        assert np.allclose([float(end) for end in ends.split(" to ")], blind.interval, atol=0.000501)
    if blind.measured is None:
        assert rest == "not yet measured" and name == "Blind run"
        return
    assert (name == "Blind run") == blind.in_time
    inside = blind.interval[0] <= blind.measured <= blind.interval[1]
    known = not any(map(math.isnan, blind.interval))
    assert (", inside" in rest) == (known and inside) and (", outside" in rest) == (known and not inside)
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
ANSWER = (
    rf"At {NUMBER} FLOPs train {NUMBER}(?: \({NUMBER}(?: to {NUMBER})?\))? parameters on {NUMBER} tokens; "
    rf"expect a loss of {NUMBER}(?: \({NUMBER}(?: to {NUMBER})?\))? nats per token\."
)


def check_answer(study: Study, text: str) -> None:
    law = study.compute_law
    C, N, *_ = match = re.search(ANSWER, text).groups()
    C_true = 4 * max(row["train_flops"] for row in study.rows)
    size = size_at(law, C_true)
    assert near(C, C_true) and near(N, size[0]) and near(match[4], C_true / (FLOPS * size[0]))
    assert near(match[5], loss_at(law, C_true)[0])
    if size[1] == size[1]:
        assert near(match[2], size[1]) and near(match[3] or match[2], size[2])
        loss = loss_at(law, C_true)
        assert near(match[6], loss[1]) and near(match[7] or match[6], loss[2])
    else:
        assert match[2] is match[6] is None and "interval not known" in text


def random_study(seed: int) -> Study:
    """Budgets and noise of many kinds, sizes that miss the best N, laws with something broken, blind runs."""
    rng = np.random.default_rng(seed)
    C = BUDGETS[: rng.integers(4, 6)]
    shift, noise = rng.choice([1.0, 1.0, 1.0, 0.05, 20.0]), rng.choice([0.0005, 0.003, 0.01, 0.1])
    rows = rows_of(rng, C, shift, noise, int(rng.integers(1, 4)))
    law = fit(rows)
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
    with contextlib.suppress(OverflowError):  # an optimum that no float can hold
        blind = blind_of(law, in_time=bool(rng.random() < 0.7)) if rng.random() < 0.7 else None
    if blind is not None:
        ends = [*blind.interval, blind.predicted, blind.predicted * 1.3, math.nan, None]
        blind = replace(blind, measured=ends[rng.integers(len(ends))])
        if blind.measured is None:
            blind = replace(blind, in_time=True)
    for row in rows:
        if rng.random() < 0.05:
            row |= {"status": str(rng.choice(["failed", "missing"])), "loss": None}
    return study_of(rows, law, blind)


@pytest.mark.parametrize("seed", range(40))
def test_every_sentence_about_a_random_frontier_is_true_of_its_table(seed: int) -> None:
    study = random_study(seed)
    for make in (plot_frontier.blind_figure, plot_frontier.slices_figure, plot_frontier.frontier_figure):
        figure = make(study)
        if figure is None:
            assert make is plot_frontier.blind_figure and study.blind is None
            continue
        pairs = [(re.fullmatch(pattern, figure.title), check) for pattern, check in SENTENCES.items()]
        (found,) = [(match, check) for match, check in pairs if match]
        found[1](study, *found[0].groups())
        assert figure.alt.startswith(figure.title.rstrip("."))
        assert not re.search(r"\b(nan|inf|None)\b", f"{figure.title} {figure.caption} {figure.alt}")
        known = {f"slice{i}" for i in range(study.compute_law.n_budgets)} | {"muted", "accent", "ink"}
        assert {chip.colour[1:] for chip in figure.chips} <= known
    text = plain(report._summary(study))
    assert (re.search(ANSWER, text) is not None) == study.compute_law.identified
    if study.compute_law.identified:
        check_answer(study, text)
    else:
        assert text.startswith("Not identified: these runs do not hold") and "N*, D* and L* are given" in text
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


# --------------------------------------------------------------------------------------- the blind check


@pytest.mark.parametrize(
    ("times", "first", "warns"),
    [
        (1.001, "Inside: predicted", False),
        (1.5, "Outside: predicted", True),
        (None, "Predicted, not yet measured:", False),
    ],
)
def test_the_page_begins_with_predicted_against_measured(
    rows: list[dict], law: ComputeLaw, times: float | None, first: str, warns: bool
) -> None:
    blind = blind_of(law)
    blind = replace(blind, measured=None if times is None else times * blind.predicted)
    text = report.page(study_of(rows, law, blind))
    body = text[text.index("</h1>") : text.index('id="figures"')]
    assert plain(body).startswith(f"Blind check {first}")
    box = re.search(r'<div class="law answer(.*?)">(.*?)</div>', body)
    assert (box[1] == " warning") == warns
    assert "95 % predictive interval" in plain(box[2]) and f"predicted {blind.predicted:.3f}" in plain(box[2])
    assert "4 times the largest fitted budget" in plain(box[2])
    assert "2026-11-22 11:40:03 UTC, sha256 0a1b2c3d4e5f." in plain(box[2])
    if times is not None:
        assert f"error {100 * (times - 1):+.2f} %" in plain(box[2])
    places = [body.index(f'id="figure-{key}"') for key in ("blind", "isoflop", "frontier", "compute")]
    assert places == sorted(places) and body.count('id="figure-blind"') == 1
    assert box.end() < places[0] < body.index("What to train next") < places[1]
    assert ("take the intervals below as too narrow" in body) == warns


def test_a_prediction_stored_after_the_run_is_not_called_blind(rows: list[dict], law: ComputeLaw) -> None:
    blind = blind_of(law, in_time=False)
    blind = replace(blind, measured=blind.predicted)
    assert blind_words.lead(blind).startswith("Not a blind check:") and blind_words.is_warning(blind)
    assert "Inside" not in blind_words.lead(blind)
    assert blind_words.title(blind).startswith("Run that was not blind")


def test_a_loss_that_reads_like_the_end_of_its_interval_gets_more_digits(law: ComputeLaw) -> None:
    blind = blind_of(law, predicted=3.0, interval=(2.9, 3.10004), measured=3.10014)
    assert blind_words.lead(blind).startswith("Outside: predicted 3.0000")
    assert "2.9000 to 3.1000), measured 3.1001;" in blind_words.lead(blind)


def test_the_blind_figure_draws_the_interval_the_measurement_and_the_runs_to_the_left(
    rows: list[dict], law: ComputeLaw
) -> None:
    blind = blind_of(law, measured=2.75)
    figure = plot_frontier.blind_figure(study_of(rows, law, blind))
    upright, lying = [trace for trace in figure.data if "error_y" in trace or "error_x" in trace]
    for trace, error, at in ((upright, "error_y", "y"), (lying, "error_x", "x")):
        value = trace[at][0]
        ends = (value - trace[error]["arrayminus"][0], value + trace[error]["array"][0])
        assert ends == pytest.approx(blind.interval)
    assert [t["y"] for t in figure.data if t.get("marker", {}).get("symbol") == "diamond"] == [[2.75], [0]]
    runs = next(trace for trace in figure.data if trace["meta"] == ["runs"])
    assert sorted(runs["y"]) == sorted(row["loss"] for row in rows) and max(runs["x"]) < blind.C
    line = next(trace for trace in figure.data if trace["meta"] == ["optimum"] and "fill" not in trace)
    assert max(line["x"]) == pytest.approx(blind.C) and line["y"][-1] == pytest.approx(
        loss_at(law, blind.C)[0]
    )


def test_a_refit_after_the_prediction_is_said(rows: list[dict], law: ComputeLaw) -> None:
    study = study_of(rows, law, blind_of(law))
    assert "fitted again" not in blind_words.record(study)
    later = replace(study, blind=replace(study.blind, predicted=study.blind.predicted * 1.01))
    assert "The law was fitted again since then." in blind_words.record(later)


# ------------------------------------------------------------------------------------------- the answer


def test_the_answers_are_for_one_four_and_ten_times_the_largest_budget(
    rows: list[dict], law: ComputeLaw
) -> None:
    text = report._summary(study_of(rows, law))
    table = re.search(r'<table class="answers">.*?<tbody>(.*?)</tbody>', text)[1]
    lines = [plain(line) for line in table.split("</tr>")[:-1]]
    assert len(lines) == 3
    for line, times in zip(lines, (1, 4, 10), strict=True):
        C = times * BUDGETS[-1]
        values = re.findall(r"([\d.]+[kM]?) \(([\d.]+[kM]?) to ([\d.]+[kM]?)\)", line)
        expected = (size_at(law, C), [C / (FLOPS * N) for N in size_at(law, C)], loss_at(law, C))
        for written, truth in zip(values, expected, strict=True):
            assert near(written[0], truth[0])
            assert all(map(near, written[1:], sorted(truth[1:])))


def test_crosses_are_at_the_lowest_point_of_their_slice(rows: list[dict], law: ComputeLaw) -> None:
    figure = plot_frontier.slices_figure(study_of(rows, law))
    crosses = [trace for trace in figure.data if trace.get("marker", {}).get("symbol") == "x"]
    assert len(crosses) == len(BUDGETS)
    for cross, C in zip(crosses, BUDGETS, strict=True):
        N = np.geomspace(1e3, 1e7, 200_001)
        L = law.loss(N, C)
        assert cross["x"][0] == pytest.approx(N[L.argmin()], rel=1e-3)
        assert cross["y"][0] == pytest.approx(L.min(), rel=1e-9)


def test_a_rejected_form_is_said_with_the_answer(rows: list[dict], law: ComputeLaw) -> None:
    text = plain(report._summary(study_of(rows, replace(law, lack_of_fit=REJECTED))))
    assert "The form of the frontier fails its lack-of-fit test (F = 31, p = 0.0001)" in text
    assert "scatter by 0.40 %, the form is off by another 2.10 %" in text and re.search(ANSWER, text)


def unsound(**changes: object) -> Law:
    params = {"E": 1.9, "A": 120.0, "B": 900.0, "alpha": 0.33, "beta": 0.42}
    return Law(
        form="chinchilla", params=params, objective=0.0, huber_delta=1e-3, n_runs=27,
        filter={"objective": AR}, ranges={"N": [1e4, 1e6], "D": [1e5, 1e7], "L": [2.9, 4.5]},
        derived={"a_exponent": 0.56}, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"identified": False, "not_identified": {"E": "E is open."}}, "Not identified: these runs do not"),
        ({"identified": True, "lack_of_fit": REJECTED}, "Rejected: repeated runs differ by 0.40 %"),
    ],
)  # fmt: skip
def test_an_unsound_parametric_law_comes_after_the_frontier_and_gives_no_number(
    rows: list[dict], law: ComputeLaw, changes: dict, words: str
) -> None:
    form = unsound(**changes)
    study = study_of(rows, law)
    study = replace(study, law=form, laws={AR: form})
    text = plain(report._summary(study))
    order = [text.index(part) for part in ("What to train next", "Parametric forms", words)]
    assert order == sorted(order)
    assert "N ∝ C 0.56" not in text and "no law" not in text.lower().split(". ")[0]
    assert re.search(rf"N ∝ C {law.params['size_exponent']:.2f} ", text)
    assert "No compute-optimal N and D" not in text
    keys = [figure.key for figure in report.figures_of(study)]
    assert "optimum" not in keys and keys[:2] == ["isoflop", "frontier"]
    assert ("misfit" in keys) == ("lack_of_fit" in changes)
    alone = plain(report._summary(replace(study, compute_law=None)))
    assert alone.startswith(words)  # the first line where nothing else answers, and then what to do
    assert ("To identify it train" in alone) == ("not_identified" in changes)
    assert ("fit the compute-optimal frontier" in alone) == ("lack_of_fit" in changes)


def test_a_study_without_any_law_says_so_first_and_which_runs_to_train(rows: list[dict]) -> None:
    text = plain(report._summary(study_of(rows, None)))
    assert text.startswith("No law is shown") and "Towards a law train" in text
    assert text.index("Towards a law train") < text.index("were trained on")


# ------------------------------------------------------------------------------------- not identified


def test_sizes_that_miss_the_best_n_are_answered_with_runs_on_the_missing_side() -> None:
    for shift, side in ((20.0, "smaller"), (0.05, "larger")):
        rows = rows_of(np.random.default_rng(2), shift=shift)
        law = replace(fit(rows), not_identified={"log_size": "The best N is outside."})
        study = study_of(rows, law)
        runs = frontier_words.runs_to_add(law, frontier_words.frontier_points(study))
        for (N, _), C in zip(runs, (BUDGETS[-1], BUDGETS[0]), strict=True):
            sizes = [row["n_params"] for row in rows if row["train_flops"] == C]
            assert (min(sizes) / 2 if side == "smaller" else 2 * max(sizes)) == N
        assert "To identify it train two more runs: N = " in frontier_words.to_do(study)


def test_runs_that_only_the_law_knows_are_told_by_their_budgets(rows: list[dict], law: ComputeLaw) -> None:
    blind = blind_of(law, measured=2.7)
    extra = rows[0] | {
        "run": "blind", "identity": "b", "n_params": blind.N, "train_tokens": blind.D, "loss": 2.7,
        "train_flops": blind.C,
    }  # fmt: skip
    study = study_of([*rows, extra], replace(law, runs=[]), blind)
    points = frontier_words.frontier_points(study)
    assert [row["run"] for row in points] == [row["run"] for row in rows]
    assert blind_words.is_blind_run(study, extra) and not blind_words.is_blind_run(study, rows[0])
    by_6nd = replace(law, C=tuple(f * 6 / FLOPS for f in law.C), runs=[])
    assert all(row["C"] == row["flops_6nd"] for row in frontier_words.frontier_points(study_of(rows, by_6nd)))
