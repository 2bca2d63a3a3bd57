"""Figures that only some studies have: budgets of equal FLOPs, repetition, runs held out, scores."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.forms import FORM
from megatron.laws.holdout import score_holdout, select_largest
from megatron.report import report
from megatron.report.figures.plot_fit import held_out_figure, pairs_figure, residual_figure
from megatron.report.figures.plot_isoflop import contour_figure, isoflop_figure
from megatron.report.figures.plot_law import select_law_points
from megatron.report.figures.plot_repeat import crossover_figure, downstream_figure, epochs_figure
from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, NO_CURVE, Study, read_study
from megatron.study.run_row import RunRow

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))
BASE = {"E": 1.7, "A": 400.0, "B": 900.0, "alpha": 0.34, "beta": 0.31}
TRUE = {
    AUTOREGRESSIVE: BASE | {"R_D": 6.0},
    MASKED_DIFFUSION: BASE | {"A": 480.0, "B": 1100.0, "R_D": 200.0},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Study:
    return read_study(synthetic["write_study"](tmp_path_factory.mktemp("plain")))


def repeated_study() -> Study:
    """Return a study of 4 sizes, 2 amounts of text and 1 to 60 epochs of both objectives, with their laws."""
    rows, laws = [], {}
    n, u, e = np.meshgrid(np.geomspace(1e7, 1e9, 4), [1e8, 1e9], [1, 4, 15, 60])
    n, d, u = n.ravel(), (u * e).ravel(), u.ravel()
    for objective, params in TRUE.items():
        loss = FORM["repeated_data"].loss(params, n, d, u)
        loss = loss * np.exp(0.002 * np.random.default_rng(0).standard_normal(len(n)))
        held_out = select_largest(n, d, 3)
        law = fit_law(
            n[~held_out], d[~held_out], loss[~held_out], U=u[~held_out], form="repeated_data", n_bootstrap=20
        )
        result = score_holdout(law, n[held_out], d[held_out], loss[held_out], u[held_out]).as_dict()
        laws[objective] = replace(
            law,
            filter={"objective": objective},
            held_out=result | {"N": n[held_out].tolist(), "D": d[held_out].tolist()},
        )
        rows += [
            RunRow(
                run=f"{objective}-{i}",
                status="done",
                objective=objective,
                n_params=N,
                loss=L,
                train_tokens=D,
                unique_tokens=U,
                epochs=D / U,
                train_flops=6 * N * D,
            )  # fmt: skip
            for i, (N, D, U, L) in enumerate(zip(n, d, u, loss, strict=True))
        ]
    return Study(Path("."), rows, {}, laws[AUTOREGRESSIVE], {}, laws=laws)


@pytest.fixture(scope="module")
def repeated() -> Study:
    return repeated_study()


def isoflop_study(params: dict[str, float]) -> Study:
    rows = []
    for c in (1e18, 1e19, 1e20):
        best = (params["A"] / params["B"]) ** (1 / (2 * params["alpha"])) * np.sqrt(c / 6)
        for n in best * np.geomspace(1 / 3, 3, 5):
            d = c / (6 * n)
            rows.append(
                RunRow(
                    run=f"{c}-{n}",
                    status="done",
                    objective=AUTOREGRESSIVE,
                    n_params=n,
                    train_tokens=d,
                    train_flops=c,
                    loss=float(FORM["chinchilla"].loss(params, n, d)),
                )  # fmt: skip
            )
    return Study(Path("."), rows, {}, None, {})


def test_isoflop_curves_have_a_cross_at_each_minimum() -> None:
    params = {"E": 1.7, "A": 400.0, "B": 400.0, "alpha": 0.3, "beta": 0.3}
    figure = isoflop_figure(isoflop_study(params))
    assert "to the power 0.50" in figure.title
    crosses = [trace for trace in figure.data if trace.get("marker", {}).get("symbol") == "x"]
    # alpha = beta and A = B: N* = D*, so 6 N*^2 = C
    assert [trace["x"][0] for trace in crosses] == pytest.approx([(c / 6) ** 0.5 for c in (1e18, 1e19, 1e20)])
    assert [chip.label for chip in figure.chips] == ["1.0e18 FLOPs", "1.0e19 FLOPs", "1.0e20 FLOPs"]


def test_a_study_without_equal_budgets_has_no_isoflop_figure(plain: Study) -> None:
    assert isoflop_figure(plain) is None


def test_contours_are_the_losses_of_the_law_and_the_path_reaches_the_largest_run(plain: Study) -> None:
    figure = contour_figure(plain)
    contour, path = figure.data[:2]
    N, D = np.array(contour["x"]), np.array(contour["y"])
    assert np.array(contour["z"]).shape == (len(D), len(N))
    assert contour["z"][3][5] == pytest.approx(float(plain.law.loss(N[5], D[3])), abs=1e-4)
    flops = 6 * np.array(path["x"]) * np.array(path["y"])
    assert flops[-1] == pytest.approx(6 * 5_046_528 * 4_718_592)


def test_residuals_are_in_percent_over_three_axes_and_the_title_has_their_spread(repeated: Study) -> None:
    figure = residual_figure(repeated)
    points = 32
    assert len(figure.data) == 3 * points
    first = repeated.finished_rows(AUTOREGRESSIVE)[0]
    law = repeated.law
    predicted = float(law.loss(first.n_params, first.train_tokens, first.unique_tokens))
    assert figure.data[0]["y"][0] == pytest.approx(100 * (first.loss / predicted - 1))
    assert {"xaxis", "xaxis2", "xaxis3"} <= set(figure.layout)
    spread = float(re.search(r"spread of ([\d.]+) %", figure.title)[1])
    assert spread == pytest.approx(0.2, abs=0.12)  # the noise in the data


def test_pairs_show_every_replicate_and_their_correlation(repeated: Study) -> None:
    figure = pairs_figure(repeated)
    clouds = [trace for trace in figure.data if trace["meta"] == ["replicates"]]
    assert [len(trace["x"]) for trace in clouds] == [20] * 4
    alpha, coefficient = (np.array(repeated.law.replicates[name]) for name in ("alpha", "A"))
    assert f"alpha and A: {np.corrcoef(alpha, np.log(coefficient))[0, 1]:.2f}" in figure.alt
    assert pairs_figure(replace(repeated, law=replace(repeated.law, replicates={}))) is None


def test_held_out_runs_are_shown_with_their_intervals(repeated: Study) -> None:
    figure = held_out_figure(repeated)
    result = repeated.law.held_out
    assert figure.data[1]["x"] == result["predicted"] and figure.data[1]["y"] == result["measured"]
    both = [law.held_out for law in repeated.laws.values()]
    assert figure.data[2]["y"] == both[1]["measured"] and figure.data[2]["y"] != figure.data[1]["y"]
    assert (
        f"{sum(law_result['n_inside'] for law_result in both)} of 6 inside their predictive interval"
        in figure.title
    )
    assert (
        f"{result['predicted'][0]:.3f} (" in figure.alt
        and f"{result['measured'][0]:.3f} measured" in figure.alt
    )
    alone = held_out_figure(replace(repeated, laws={AUTOREGRESSIVE: repeated.law}))
    assert f"{result['n_inside']} of 3 inside" in alone.title and alone.chips == []
    assert held_out_figure(replace(repeated, laws={})) is None


def test_figures_of_a_fit_show_the_runs_that_it_was_fitted_on_and_no_others(repeated: Study) -> None:
    rows = repeated.finished_rows(AUTOREGRESSIVE)
    most = sorted(row.loss for row in rows)[-3]
    held_out = min(rows, key=lambda row: row.loss).run
    filters = {"objective": AUTOREGRESSIVE, "max_loss": most}
    law = replace(repeated.law, filter=filters, held_out=repeated.law.held_out | {"runs": [held_out]})
    shown = {row.run for row in select_law_points(replace(repeated, law=law))}
    assert shown == {row.run for row in rows if row.loss <= most} - {held_out}
    assert len(shown) == len(rows) - 3


def test_lines_of_epochs_have_one_size_and_one_text_and_turns_are_reported(repeated: Study) -> None:
    figure = epochs_figure(repeated)
    assert len(figure.data) == 2 * 4 * 2
    assert all(sorted(trace["x"]) == trace["x"] == [1, 4, 15, 60] for trace in figure.data)
    # in this form repeated tokens lose value but never increase the loss
    assert "the loss still falls at 60 epochs in every line" in figure.title.lower()
    worse = [replace(row, loss=row.loss + 0.5 * (row.epochs > 20)) for row in repeated.rows]
    turned = epochs_figure(replace(repeated, rows=worse))
    assert "8 of 8 lines turn up, the earliest after 15 epochs" in turned.title


def test_the_crossover_figure_is_the_crossover_of_the_two_laws(repeated: Study) -> None:
    figure = crossover_figure(repeated)
    assert re.search(
        r"By the laws masked diffusion has the lower loss above C_crit = \S+ U\^[\d.]+", figure.title
    )
    assert (np.diff(figure.data[-1]["y"]) > 0).all()
    assert crossover_figure(replace(repeated, laws={AUTOREGRESSIVE: repeated.law})) is None


def test_scores_are_drawn_over_the_loss_with_their_curve(tmp_path: Path) -> None:
    folder = synthetic["write_study"](tmp_path / "study")
    runs = [row for row in read_study(folder).finished_rows(AUTOREGRESSIVE)]
    lines = [f"{row.run},quiz,{0.9 - 2.0 * np.exp(-0.7 * row.loss)},error" for row in runs]
    (folder / "scores.csv").write_text("\n".join(["run,task,score,kind", *lines]) + "\n")
    study = read_study(folder)
    figure = downstream_figure(study)
    assert "quiz follows the loss (rank correlation 1.00, 15 runs)" in figure.title
    assert "off its curve by 0.0 points at most" in figure.title
    assert len(figure.data[0]["x"]) == len(runs)
    (folder / "scores.csv").write_text("run,score\na,b\n")
    broken = read_study(folder)
    assert downstream_figure(broken) is None
    assert any("scores.csv cannot be used" in fault for fault in broken.faults)


def test_the_laws_of_both_objectives_are_read_and_a_page_has_every_figure(
    repeated: Study, tmp_path: Path
) -> None:
    folder = synthetic["write_study"](tmp_path / "study")
    repeated.laws[MASKED_DIFFUSION].save(folder / "law_masked_diffusion.json")
    study = read_study(folder)
    assert set(study.laws) == {AUTOREGRESSIVE, MASKED_DIFFUSION}
    assert study.laws[MASKED_DIFFUSION].params["R_D"] == repeated.laws[MASKED_DIFFUSION].params["R_D"]
    curves = {row.run: NO_CURVE for row in repeated.rows}
    figures = report.make_figures(replace(repeated, curves=curves))
    expected = {"heldout", "residuals", "contours", "pairs", "epochs", "crossover"}
    assert expected <= {figure.key for figure in figures}
    for figure in figures:
        axes = [axis for name, axis in figure.layout.items() if re.match("[xy]axis", name)]
        assert all(re.search("tokens|nats|FLOPs|parameters", axis["title"]["text"]) for axis in axes)
