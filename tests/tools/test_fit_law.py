"""Tests of tools/fit_law.py from the command line; tests/tools/test_refusals.py has its errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from megatron.laws.forms import FORM
from megatron.laws.law import Law
from megatron.study.selection import Columns, select_runs
from tests.tools.conftest import TRUTH, simulate_runs


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "law.json"


def write_runs(folder: Path, noise: float = 0.0, **columns: Any) -> Path:
    """Write 18 finished runs, one that failed, and three of another objective."""
    runs = simulate_runs(6, 3, noise).assign(objective="autoregressive", status="done", epochs=[1, 1, 2] * 6)
    runs = runs.assign(run=[f"r{i}{j}" for i in range(6) for j in range(3)], **columns)
    failed = runs[:1].assign(run="bad", status="failed", loss=np.nan)
    others = runs[:3].assign(run=["a", "b", "c"], objective="masked_diffusion", loss=4.0)
    pd.concat([runs, failed, others]).to_csv(folder / "runs.csv", index=False)
    return folder / "runs.csv"


def test_the_law_is_recovered_and_omitted_runs_are_reported(cli, tmp_path: Path, out: Path) -> None:
    words = ("--form", "chinchilla", "--objective", "autoregressive", "--n-bootstrap", 50)
    done = cli("fit", write_runs(tmp_path), *words, "--out", out)
    law = json.loads(out.read_text())
    assert law["n_runs"] == 18
    assert law["params"]["alpha"] == pytest.approx(0.33, rel=1e-6)
    assert law["filter"] == {"status": "done", "objective": "autoregressive"}
    assert f"{out}: L = 1.8 + 300/N^0.33 + 500/D^0.3  (18 runs)" in done.output
    assert "1 of 22 runs in the table are not done" in done.output
    assert "6 runs saw some text more than once" in done.output


def test_published_points_are_fitted_from_their_own_columns(cli, laws: Path, out: Path) -> None:
    table = laws / "chinchilla_epoch" / "svg_extracted_data.csv"
    words = ("--n-column", "Model Size", "--flops-column", "Training FLOP", "--n-bootstrap", 0)
    cli("fit", table, *words, "--out", out)
    expected = json.loads((laws / "expected.json").read_text())["chinchilla_epoch"]["all_245_points_huber"]
    assert json.loads(out.read_text())["objective"] == pytest.approx(expected["objective_sum"], rel=1e-8)


def test_runs_marked_held_out_are_predicted_and_not_fitted(cli, tmp_path: Path, out: Path) -> None:
    """20 runs under a known law; the two largest are 5 % and 10 % above it."""
    runs = simulate_runs(6, 3).assign(held_out=0)
    largest = pd.DataFrame({"n_params": [5e9, 5e9], "train_tokens": [2e10, 2e11], "held_out": 1})
    loss = FORM["chinchilla"].loss(TRUTH, largest.n_params.to_numpy(), largest.train_tokens.to_numpy())
    runs = pd.concat([runs, largest.assign(loss=loss * [1.05, 1.10])])
    runs = runs.assign(run=[f"r{i:02d}" for i in range(20)])
    runs.to_csv(table := tmp_path / "marked.csv", index=False)
    done = cli("fit", table, "--out", out, "--n-bootstrap", 30)
    law = json.loads(out.read_text())
    # neither the fit nor any replicate uses them: all recover the law of the other runs
    assert law["params"]["alpha"] == pytest.approx(0.33, rel=1e-6)
    assert np.array(law["replicates"]["beta"]) == pytest.approx(0.3, rel=1e-4)
    scores = law["held_out"]
    assert scores["runs"] == ["r18", "r19"] and scores["N"] == [5e9, 5e9]
    assert law["runs"] == [f"r{i:02d}" for i in range(18)] and law["n_runs"] == 18
    assert np.array(scores["measured"]) / scores["predicted"] == pytest.approx([1.05, 1.10], rel=1e-6)
    assert scores["worst_percent"] == pytest.approx(100 * np.log(1.10), rel=1e-5)
    assert scores["n_inside"] == 0 and "2 runs held out" in done.output
    cli("fit", table, "--out", out, "--n-bootstrap", 0, "--hold-out", 1)
    assert json.loads(out.read_text())["held_out"]["runs"] == ["r17", "r18", "r19"]
    cli("fit", table, "--out", out, "--n-bootstrap", 0, "--fit-all")
    assert (json.loads(out.read_text())["n_runs"], json.loads(out.read_text())["held_out"]) == (20, {})
    assert "2 held out" in cli("fit", table, "--compare", "chinchilla").output


@pytest.fixture
def repeats(tmp_path: Path) -> Path:
    """60 runs under the law of over-repetition, with unique tokens."""
    n, u, e = np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e8, 1e10, 3), [1, 3, 10, 40])
    n, u, e = n.ravel(), u.ravel(), e.ravel()
    loss = FORM["chinchilla"].loss(TRUTH, n, u * e) + 0.03 * (n / u) ** 0.5 * (e - 1) ** 0.8
    loss *= np.exp(0.002 * np.random.default_rng(0).standard_normal(60))
    runs = pd.DataFrame({"n_params": n, "train_tokens": u * e, "unique_tokens": u, "loss": loss})
    runs.to_csv(tmp_path / "repeats.csv", index=False)
    return tmp_path / "repeats.csv"


def test_a_form_of_repetition_is_fitted_and_forms_are_compared(cli, repeats: Path, out: Path) -> None:
    done = cli("fit", repeats, "--compare", "chinchilla,over_repetition", "--hold-out", 6, "--out", out)
    assert [line.split()[0] for line in done.output.splitlines()[1:]] == ["over_repetition", "chinchilla"]
    assert not out.exists()
    words = ("--form", "repeated_data", "--hold-out", 5, "--n-bootstrap", 5)
    done = cli("fit", repeats, *words, "--out", out)
    law = json.loads(out.read_text())
    assert (law["form"], law["n_runs"], law["columns"]["U"]) == ("repeated_data", 55, "unique_tokens")
    assert law["held_out"]["n_runs"] == 5 and "5 runs held out: off by" in done.output


def test_a_different_flops_convention_gives_a_different_fit(cli, tmp_path: Path, out: Path) -> None:
    c = np.repeat([1e18, 1e19, 1e20], 5)
    n = np.sqrt(c / 120) * np.tile(np.geomspace(0.4, 2.5, 5), 3)
    d = c / (6 * n)
    runs = pd.DataFrame({"n_params": n, "train_tokens": d, "loss": 1.8 + 300 / n**0.3 + 735 / d**0.3})
    runs.assign(exact=7 * n**0.99 * d).to_csv(tmp_path / "isoflop.csv", index=False)
    exponents = []
    for by in ("6nd", "exact"):
        cli("fit", tmp_path / "isoflop.csv", "--approach", 2, "--flops-by", by, "--out", out)
        exponents.append(json.loads(out.read_text())["N"]["exponent"])
    # at equal C = 6 N D the surface is symmetric in log N, so with 6 N D the exponent is exactly 1/2
    assert exponents[0] == pytest.approx(0.5, abs=1e-3)
    assert exponents[1] != pytest.approx(exponents[0], abs=1e-5)


@pytest.mark.parametrize(
    ("column", "words", "n_groups", "note"),
    [
        ("trunk", (), 12, ""),
        ("trunk", ("--group", "none"), None, ""),
        ("run", (), 12, "84 rows repeat the name of another run"),
        ("run", ("--group", "run"), 12, ""),
        ("seed", (), 12, "rows that share N correlate"),
    ],
)
def test_rows_of_one_trunk_run_or_size_with_shared_noise_are_grouped_unless_none_is_given(
    cli, tmp_path: Path, out: Path, column: str, words: tuple[str, ...], n_groups: int | None, note: str
) -> None:
    """Twelve models at eight checkpoints each, with noise shared by a model's rows."""
    n = np.repeat(np.geomspace(1e7, 1e9, 12), 8)
    d = n * np.tile(np.geomspace(4, 100, 8), 12)
    noise = np.exp(0.004 * np.random.default_rng(0).standard_normal(12).repeat(8))
    loss = (1.8 + 480 / n**0.348 + 2085 / d**0.366) * noise
    names = np.repeat([f"m{i}" for i in range(12)], 8)
    runs = pd.DataFrame({"n_params": n.round(), "train_tokens": d.round(), "loss": loss, column: names})
    runs.to_csv(tmp_path / "table.csv", index=False)
    done = cli("fit", tmp_path / "table.csv", "--out", out, "--n-bootstrap", 10, *words)
    assert Law.load(out).noise["n_groups"] == n_groups
    assert note in done.output and ("repeat the name" in done.output) == ("repeat the name" in note)


def test_one_file_holds_many_laws_and_each_is_fitted_on_its_own_rows(cli, tmp_path: Path, out: Path) -> None:
    runs = simulate_runs(5, 4)
    runs = runs.assign(dataset="c4", layers=np.where(runs.n_params > 1e8, 8, 4))
    table = tmp_path / "table.csv.gz"
    pd.concat([runs, runs.assign(dataset="code", loss=runs.loss - 0.9)]).to_csv(table, index=False)
    for dataset, floor in (("c4", 1.8), ("code", 0.9)):
        cli("fit", table, "--where", f"dataset == {dataset!r}", "--out", out, "--n-bootstrap", 0)
        law = Law.load(out)
        assert law.params["E"] == pytest.approx(floor, rel=1e-6) and law.n_runs == 20
        assert law.filter["where"] == [f"dataset == {dataset!r}"]
    counts = {"layers<8": 24, "layers != 4": 16, "layers>=4": 40, "dataset != 'c4'": 20}
    for condition, n_rows in counts.items():
        assert len(select_runs(table, Columns(), where=[condition]).N) == n_rows


def test_a_fixed_constant_and_the_extrapolation_are_stored(cli, tmp_path: Path, out: Path) -> None:
    table = write_runs(tmp_path, noise=0.003, loss_se=0.02)
    words = ("--objective", "autoregressive", "--hold-out", 2, "--n-bootstrap", 20, "--fix", "alpha=0.34")
    done = cli("fit", table, *words, "--out", out)
    stored = json.loads(out.read_text())
    sizes, tokens = (np.array(stored["held_out"][name]) for name in "ND")
    assert stored["extrapolation"]["compute"] < 6 * (sizes * tokens).min()
    assert "more deviation for each factor of e in compute" in done.output
    assert len(stored["runs"]) == 16 and not set(stored["runs"]) & set(stored["held_out"]["runs"])
    assert stored["text_error"]["loss_se"] == 0.02
    assert (stored["params"]["alpha"], stored["fixed"]) == (0.34, ["alpha"])


def test_a_law_that_is_not_identified_is_printed_with_a_warning(cli, tmp_path: Path, out: Path) -> None:
    n, d = np.repeat([1e7, 2e7, 4e7], 3), np.tile([1e9, 2e9, 4e9], 3)
    noise = np.exp(0.01 * np.random.default_rng(1).standard_normal(9))
    runs = pd.DataFrame({"n_params": n, "train_tokens": d, "loss": FORM["chinchilla"].loss(TRUTH, n, d)})
    runs.assign(loss=runs.loss * noise).to_csv(tmp_path / "table.csv", index=False)
    words = ("fit", tmp_path / "table.csv", "--n-bootstrap", 100, "--out", out)
    lines = cli(*words).output.splitlines()
    law = Law.load(out)
    assert law.identified is False and "alpha" in law.not_identified
    assert "NOT IDENTIFIED by these runs: " in lines[1]
    assert "  to do: choose runs to add with `scaling plan" in lines[-1]
    assert any(line.startswith("  alpha") and line.endswith("not identified") for line in lines)
