"""Tests of scaling predict from the command line."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.forms import FORM

TRUTH = {"E": 1.7, "A": 400.0, "B": 900.0, "alpha": 0.34, "beta": 0.31}


@pytest.fixture(scope="module")
def law_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """law.json, which is identified, and ray.json, fitted to runs of one D/N."""
    folder = tmp_path_factory.mktemp("laws")
    rng = np.random.default_rng(3)
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 6), np.geomspace(1e9, 1e11, 5)))
    loss = FORM["chinchilla"].loss(TRUTH, n, d) * np.exp(0.001 * rng.standard_normal(30))
    law = fit_law(n, d, loss, n_bootstrap=100)
    assert law.identified
    law.save(folder / "law.json")
    n = np.geomspace(1e7, 1e9, 12)
    loss = FORM["chinchilla"].loss(TRUTH, n, 20 * n) * np.exp(0.003 * rng.standard_normal(12))
    fit_law(n, 20 * n, loss, n_bootstrap=20).save(folder / "ray.json")
    return folder


def test_intervals_of_a_run_and_an_optimum_are_labelled(cli, law_files: Path) -> None:
    done = cli("predict", law_files / "law.json", 7e9, 1.4e10, "--flops", 1e21)
    words = done.output
    assert "95 % predictive [" in words and "95 % confidence [" in words
    assert "OUTSIDE the fitted runs: N is above 1e+09" in words and "D is above" not in words.split("C 1e")[0]
    assert "N* " in words and "D* " in words and "L* " in words and "one new run: 95 %" in words
    inside = cli("predict", law_files / "law.json", 1e8, 1e10, status=None).output
    assert "within the range of the fitted runs" in inside and "OUTSIDE" not in inside


def test_outside_the_runs_intervals_include_the_measured_error_of_extrapolation(cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 4)))
    loss = FORM["chinchilla"].loss(TRUTH, n, d) * np.exp(0.003 * rng.standard_normal(20))
    law = replace(fit_law(n, d, loss, n_bootstrap=30), extrapolation={})
    grown = replace(law, extrapolation={"growth": 0.02, "dof": 4.0, "compute": 6e20})
    for used, note in ((law, "lack the error of extrapolation"), (grown, "include 2 % more deviation")):
        used.save(tmp_path / "law.json")
        answer = json.loads(cli("predict", tmp_path / "law.json", 7e10, 1.4e12, "--json").output)
        far = answer["prediction"]
        assert far["predictive"] == pytest.approx([float(v) for v in used.predict(7e10, 1.4e12)[1:]])
        assert note in far["note"]
        inside = json.loads(cli("predict", tmp_path / "law.json", 1e8, 1e10, "--json").output)
        assert inside["prediction"]["note"] == ""


def test_json_has_the_same_numbers(cli, law_files: Path) -> None:
    answer = json.loads(
        cli("predict", law_files / "law.json", 7e9, 1.4e10, "--flops", 1e21, "--json", status=None).output
    )
    assert answer["identified"] is True
    prediction, best = answer["prediction"], answer["optimum"]
    assert (
        prediction["predictive"][0]
        < prediction["confidence"][0]
        < prediction["loss"]
        < prediction["predictive"][1]
    )
    assert best["N"] * best["D"] * 6 == pytest.approx(1e21)
    text = cli("predict", law_files / "law.json", 7e9, 1.4e10, status=None).output
    assert (
        f"loss in nats per token {prediction['loss']:.5g}" in text
        and f"[{prediction['predictive'][0]:.5g}, " in text
    )


def test_a_law_that_is_not_identified_prints_that_first(cli, law_files: Path) -> None:
    lines = cli("predict", law_files / "ray.json", 1e8, 2e9, status=None).output.splitlines()
    assert lines[0].startswith("NOT IDENTIFIED by the runs of this law: ")
    answer = json.loads(cli("predict", law_files / "ray.json", 1e8, 2e9, "--json").output)
    assert answer["identified"] is False and answer["not_identified"]


def test_published_laws_are_listed_and_predict(cli) -> None:
    listed = cli("predict", "--list", status=None).output
    for name in ("chinchilla", "besiroglu", "muennighoff", "gadre-c4", "kaplan", "step-law"):
        assert f"\n{name} " in f"\n{listed}"
    assert listed.count("arXiv") >= 9
    done = cli("predict", "chinchilla-unrounded", "--flops", 5.76e23, status=None)
    assert "N* 4.03" in done.output or "N* 4.04" in done.output
    assert "no interval" in done.output and "95 %" not in done.output
    rate = cli("predict", "step-law", 1e9, 1e11, status=None).output
    assert f"learning rate {1.79 * 1e9**-0.713 * 1e11**0.307:.4g}" in rate


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("nothing.json", 1, 2), 1, "got neither a file nor the name"),
        (("chinchilla", -1, 2), 1, "N: got -1.0"),
        (("chinchilla", "nan", 2), 1, "N: got nan"),
        (("chinchilla", 1e9), 2, "expected both"),
        (("chinchilla",), 2, "no N and D and no --flops"),
        ((), 2, "got no LAW"),
        (("chinchilla", 1e9, 1e10, "--unique", 1e9), 1, "no term for repetition"),
        (("chinchilla", "--flops", 0), 1, "C: got 0.0"),
        (("chinchilla", "--flops", 1e20, "--flops-per-param-token", 7), 2, "Use --flops with 6/K times"),
        (("step-law", "--flops", 1e20), 1, "It is not a law of loss"),
        (("chinchilla", 1e9, 1e10, "--level", 95), 2, "Use Law.predict(N, D, level=SHARE)"),
    ],
)
def test_invalid_arguments_are_refused(cli, words: tuple, status: int, sentence: str) -> None:
    done = cli("predict", *words, status=None)
    assert done.status == status and sentence in done.error
    assert done.output == "" and "Traceback" not in done.error


def test_a_file_that_is_not_a_law_is_refused(cli, tmp_path: Path) -> None:
    (tmp_path / "law.json").write_text("[1, 2]")
    done = cli("predict", tmp_path / "law.json", 1e9, 1e10, status=None)
    assert done.status == 1 and "not a law" in done.error
