"""Fits of data frames and of a caller's own form, and what the fitted objects print, plot and become."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.laws import (
    extrapolate_law,
    fit_compute_law,
    fit_downstream,
    fit_isoflop,
    fit_law,
    optimal_frontier,
)
from megatron.laws.law import Law
from tests.laws.known_laws import make_isoflop, simulate_losses


def make_frame() -> pd.DataFrame:
    """Return 25 runs at 5 budgets of a known law with 0.2 % noise, in columns of this project's tables."""
    N, D = make_isoflop(5)
    L = simulate_losses(N, D, 0.002)
    columns = {"n_params": N, "train_tokens": D, "loss": L, "train_flops": 6 * N * D}
    return pd.DataFrame(columns | {"seen": D / 2, "error": 1 / L})


def test_a_frame_with_named_columns_has_the_law_of_its_arrays() -> None:
    frame = make_frame()
    N, D, L, U = (frame[name].to_numpy() for name in ("n_params", "train_tokens", "loss", "seen"))
    options = {"form": "repeated_data", "n_bootstrap": 10}
    assert fit_law(frame, U="seen", **options) == fit_law(N, D, L, U=U, **options)
    renamed = frame.rename(columns={"n_params": "size", "loss": "nats"})
    assert fit_law(renamed, N="size", L="nats", n_bootstrap=10) == fit_law(N, D, L, n_bootstrap=10)
    assert fit_law(N=frame["n_params"], D=frame["train_tokens"], L=L, n_bootstrap=0).n_runs == 25
    with pytest.raises(ValueError, match="L: got no column 'nats', expected one of n_params, train_tokens"):
        fit_law(frame, L="nats")


def test_every_fit_takes_a_frame() -> None:
    table = make_frame()
    C = table["train_flops"].to_numpy()
    columns = [table[name].to_numpy() for name in ("n_params", "train_tokens", "loss")]
    assert fit_compute_law(table).params == fit_compute_law(*columns, C).params
    assert fit_isoflop(table).size.exponent == fit_isoflop(*columns, C).size.exponent
    assert fit_downstream(table, scores="error", n_bootstrap=0).params["gamma"] > 0
    assert extrapolate_law(table, form="over_training", n_bootstrap=4).extrapolation["dof"] == 4


def shared_exponent(params: dict, N: np.ndarray, D: np.ndarray, U: np.ndarray) -> np.ndarray:
    return params["E"] + params["A"] * N ** -params["g"] + params["B"] * D ** -params["g"]


def test_an_own_form_has_the_fit_of_the_built_in_one(tmp_path: Path) -> None:
    frame = make_frame()
    start = {"E": 1.0, "A": 100.0, "B": 5000.0, "g": 0.5}
    custom = fit_law(frame, form=shared_exponent, start=start, n_bootstrap=40)
    built_in = fit_law(frame, form="over_training", n_bootstrap=40)
    assert custom.objective == pytest.approx(built_in.objective, rel=1e-9)
    assert custom.params["g"] == pytest.approx(built_in.params["eta"], rel=1e-6)
    assert custom.interval["params"]["g"] == pytest.approx(built_in.interval["params"]["eta"], rel=1e-4)
    predictions = (law.predict([1e8, 1e9], [1e10, 1e11]) for law in (custom, built_in))
    for ours, other in zip(*predictions, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-4)
    assert pytest.approx(optimal_frontier(built_in, 1e21).L, rel=1e-5) == optimal_frontier(custom, 1e21).L
    custom.save(tmp_path / "law.json")
    assert Law.load(tmp_path / "law.json", shared_exponent) == custom
    with pytest.raises(ValueError, match="form: got 'shared_exponent', expected one of chinchilla"):
        Law.load(tmp_path / "law.json")


def test_an_own_form_may_have_a_negative_constant() -> None:
    frame = make_frame()

    def line(params: dict, N: np.ndarray, D: np.ndarray, U: np.ndarray) -> np.ndarray:
        return np.exp(params["level"] + params["n"] * np.log(N / 1e8) + params["d"] * np.log(D / 1e9))

    start = {"level": 1.0, "n": -0.1, "d": -0.1}
    law = fit_law(frame, form=line, start=start, huber_delta=1e3, n_bootstrap=0)
    x, y = np.log(frame["n_params"] / 1e8), np.log(frame["train_tokens"] / 1e9)
    logs = np.column_stack([np.ones(25), x, y])
    expected = np.linalg.lstsq(logs, np.log(frame["loss"]), rcond=None)[0]
    assert list(law.params.values()) == pytest.approx(expected, rel=1e-6)


def test_laws_print_in_a_line_and_become_frames_and_figures() -> None:
    """The law's own frames are in the session of LAWS.md, which test_public_names.py runs."""
    frame = make_frame()
    frontier = fit_compute_law(frame)
    assert repr(frontier).startswith("<ComputeLaw, 25 runs at 5 budgets") and len(repr(frontier)) < 120
    optima = frontier.to_frame([1e19, 1e20])
    assert optima["N"].tolist() == [frontier.optimum(C).N for C in (1e19, 1e20)]
    assert (optima["predictive_low"] < optima["loss"]).all()
    assert len(frontier.plot().data) == 4
    figure = fit_law(frame, n_bootstrap=0).plot(frame["n_params"], frame["train_tokens"], frame["loss"])
    assert [trace.name for trace in figure.data][-1] == "runs" and len(figure.data[-1].x) == 25


def test_perplexities_in_place_of_losses_are_warned_about() -> None:
    frame = make_frame()
    law = fit_law(frame.assign(loss=np.exp(3 * frame["loss"])), n_bootstrap=0)
    assert "Take the log of perplexities." in law.warnings[0]
