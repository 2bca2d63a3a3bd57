"""Tests of scaling predict from the command line; tests/tools/test_refusals.py has its errors."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.forms import FORM
from tests.tools.conftest import TRUTH, read_traces, simulate_runs


@pytest.fixture(scope="module")
def law_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """law.json, which is identified, and ray.json, fitted to runs of one D/N."""
    folder = tmp_path_factory.mktemp("laws")
    law = fit_law(*simulate_runs(6, 5, noise=0.001).to_numpy().T, n_bootstrap=100)
    assert law.identified
    law.save(folder / "law.json")
    n = np.geomspace(1e7, 1e9, 12)
    noise = np.exp(0.003 * np.random.default_rng(3).standard_normal(12))
    loss = FORM["chinchilla"].loss(TRUTH, n, 20 * n) * noise
    fit_law(n, 20 * n, loss, n_bootstrap=20).save(folder / "ray.json")
    return folder


def test_intervals_of_a_run_and_an_optimum_are_labelled(cli, law_files: Path) -> None:
    words = ("predict", law_files / "law.json", 7e9, 1.4e10, "--flops", 1e21)
    text = cli(*words).output
    assert "95 % predictive [" in text and "95 % confidence [" in text
    assert "OUTSIDE the fitted runs: N is above 1e+09" in text and "D is above" not in text.split("C 1e")[0]
    assert "N* " in text and "D* " in text and "L* " in text and "one new run: 95 %" in text
    inside = cli("predict", law_files / "law.json", 1e8, 1e10).output
    assert "within the range of the fitted runs" in inside and "OUTSIDE" not in inside
    page = law_files / "predict.html"
    answer = json.loads(cli(*words, "--json", "--plot", page).output)
    assert answer["identified"] is True
    run, best = answer["prediction"], answer["optimum"]
    assert run["predictive"][0] < run["confidence"][0] < run["loss"] < run["predictive"][1]
    *_, point, _ = read_traces(page)
    bar = [point["y"][0] - point["error_y"]["arrayminus"][0], point["y"][0] + point["error_y"]["array"][0]]
    assert bar == pytest.approx(run["predictive"])
    assert best["N"] * best["D"] * 6 == pytest.approx(1e21)
    assert f"loss in nats per token {run['loss']:.5g}" in text and f"[{run['predictive'][0]:.5g}, " in text


def test_outside_the_runs_intervals_include_the_measured_error_of_extrapolation(cli, tmp_path: Path) -> None:
    runs = simulate_runs(5, 4, noise=0.003).to_numpy().T
    law = replace(fit_law(*runs, n_bootstrap=30), extrapolation={})
    grown = replace(law, extrapolation={"growth": 0.02, "dof": 4.0, "compute": 6e20})
    for used, note in ((law, "lack the error of extrapolation"), (grown, "include 2 % more deviation")):
        used.save(tmp_path / "law.json")
        far, inside = (
            json.loads(cli("predict", tmp_path / "law.json", *run, "--json").output)["prediction"]
            for run in ((7e10, 1.4e12), (1e8, 1e10))
        )
        assert far["predictive"] == pytest.approx([float(v) for v in used.predict(7e10, 1.4e12)[1:]])
        assert note in far["note"] and inside["note"] == ""


def test_a_law_that_is_not_identified_prints_that_first(cli, law_files: Path) -> None:
    lines = cli("predict", law_files / "ray.json", 1e8, 2e9).output.splitlines()
    assert lines[0].startswith("NOT IDENTIFIED by the runs of this law: ")
    answer = json.loads(cli("predict", law_files / "ray.json", 1e8, 2e9, "--json").output)
    assert answer["identified"] is False and answer["not_identified"]


def test_published_laws_are_listed_and_predict(cli) -> None:
    listed = cli("predict", "--list").output
    for name in ("chinchilla", "besiroglu", "muennighoff", "gadre-c4", "kaplan", "step-law"):
        assert f"\n{name} " in f"\n{listed}"
    assert listed.count("arXiv") >= 9
    done = cli("predict", "chinchilla-unrounded", "--flops", 5.76e23)
    assert "N* 4.03" in done.output or "N* 4.04" in done.output
    assert "no interval" in done.output and "95 %" not in done.output
    rate = cli("predict", "step-law", 1e9, 1e11).output
    assert f"learning rate {1.79 * 1e9**-0.713 * 1e11**0.307:.4g}" in rate
