"""Tests of scaling mix on a table of runs."""

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.tools.conftest import read_traces

DOMAINS = ("code", "web", "wiki")
NAMES = ("answer", "natural mixture", "best trained")  # in BEST_MIXTURE.md


def true_loss(w: np.ndarray, size: float, tokens: float) -> float:
    return 2.0 + (w**0.7).sum() ** -0.3 * (40 / size**0.3 + 60 / tokens**0.3)


def write_runs(path: Path, noise: float) -> pd.DataFrame:
    """Write 12 mixtures at two sizes, the last one held out. The even mixture is the best."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(3), 12)
    rows = []
    for size, tokens in ((1e6, 2e7), (4e6, 8e7)):
        for i, w in enumerate(weights):
            loss = true_loss(w, size, tokens) * np.exp(noise * rng.normal())
            row = {"run": f"m{i}-{size:.0e}", "n_params": size, "train_tokens": tokens}
            row |= {"held_out": int(i == 11), "epochs_wiki": w[2] * tokens / 1e9, "loss": loss}
            row |= {f"weight_{name}": share for name, share in zip(DOMAINS, w, strict=True)}
            rows.append(row)
    table = pd.DataFrame(rows)
    table.to_csv(path, index=False)
    return table


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_runs(tmp_path / "runs.csv", 1e-4)
    return tmp_path / "runs.csv"


def test_the_best_mixture_is_found_and_compared(cli, runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "mixtures.html"
    output = cli("mix", runs, "--natural", "code=0.9", "web=0.1", "--plot", page).output
    assert "22 runs of 11 mixtures" in output and "NOT IDENTIFIED" not in output
    weights = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.startswith(DOMAINS)}
    assert [float(weights[name][0]) for name in DOMAINS] == pytest.approx([1 / 3] * 3, abs=0.03)
    assert float(weights["wiki"][1]) == pytest.approx(8e7 / 3 / 1e9, abs=0.003)
    assert [float(weights[name][-1]) for name in DOMAINS] == [0.9, 0.1, 0.0]  # the natural mixture
    natural = next(line for line in output.splitlines() if "below natural" in line)
    even, other = (true_loss(np.array(w), 4e6, 8e7) for w in ([1 / 3] * 3, [0.9, 0.1, 0.0]))
    assert natural.endswith("better")
    assert float(natural.split(": ")[1].split()[0]) == pytest.approx(100 * (1 - even / other), abs=0.1)
    # the held-out runs are those of the last mixture
    unseen = [line for line in output.splitlines() if line.startswith("not fitted")]
    assert [line.split()[2] for line in unseen[:2]] == ["m11-1e+06:", "m11-4e+06:"]
    assert unseen[2] == "not fitted: 2 of 2 inside"
    (lines,) = read_traces(page)
    assert [at["label"] for at in lines["dimensions"]] == [*DOMAINS, "loss"]


def test_a_size_that_no_run_shows_is_named(cli, runs: Path, tmp_path: Path) -> None:
    table = pd.read_csv(runs)
    table["held_out"] = table["held_out"] == 1
    table = table[(table.n_params == 1e6) | table.held_out]
    table["epochs_wiki"] = table["epochs_wiki"].astype(object)
    table.loc[table.index[0], "epochs_wiki"] = "many"
    table.to_csv(tmp_path / "one.csv", index=False)
    output = cli("mix", tmp_path / "one.csv", "--size", "1e8").output
    assert "11 runs of 11 mixtures" in output and ", n_params 100M, train_tokens 20M" in output
    assert "NOT IDENTIFIED: other n_params: all runs have 1.0M" in output
    assert output.count("\nnot fitted: ") == 3
    assert "warning: row 1, epochs_wiki: got 'many'" in output


def test_the_answer_keeps_to_bounds_and_epochs(cli, runs: Path) -> None:
    words = ("mix", runs, "--tokens", 1e10, "--max-epochs", 2, "--bounds", "code=0.5:0.6")
    rows = {
        line.split()[0]: line.split()[1:]
        for line in cli(*words).output.splitlines()
        if line.startswith(DOMAINS)
    }
    assert 0.5 <= float(rows["code"][0]) <= 0.6
    assert float(rows["wiki"][1]) == pytest.approx(2, abs=0.01) and rows["wiki"][2] == "True"


def test_the_worked_example_shows_the_output_of_its_command(cli, root: Path, tmp_path: Path) -> None:
    pages = root / "examples_scaling/training"
    shutil.copy(pages / "mixture_cpu/table.csv", tmp_path)
    shutil.copy(pages / "study_mixture_cpu.yaml", tmp_path / "study.yaml")
    text = (pages / "BEST_MIXTURE.md").read_text()
    words = next(line for line in text.splitlines() if line.startswith("scaling mix")).split()[3:]
    output = cli("mix", tmp_path / "table.csv", *words, "--size", 358560, "--tokens", 4e6).output
    assert output[output.index("  predicted") : output.index("not fitted: ")] in text
    measured = re.findall(r"predicted ([\d.]+) .*, measured ([\d.]+)", output)
    for name, (_, first), (_, second) in zip(NAMES, measured[::2], measured[1::2], strict=True):
        assert f"{name} {first} and {second}" in text
    assert "not fitted: 6 of 6 inside" in output
    assert output.splitlines()[0] in text


def test_rows_without_names_are_numbered(cli, runs: Path) -> None:
    pd.read_csv(runs).drop(columns=["run", "epochs_wiki"]).to_csv(runs, index=False)
    output = cli("mix", runs).output
    assert "not fitted: 12: predicted" in output and "nan" not in output.lower()


def test_wrong_words_are_refused(cli, runs: Path) -> None:
    pd.read_csv(runs).assign(held_out=1).to_csv(runs.with_name("none.csv"), index=False)
    assert "mixtures: got 0, expected several" in cli("mix", runs.with_name("none.csv"), status=1).error
    assert "code=0.4" in cli("mix", runs, "--natural", "code=x", status=2).error
    assert "got domain 'cod'" in cli("mix", runs, "--bounds", "cod=0:1", status=1).error
    assert "loss_of_web: got no such column" in cli("mix", runs, "--targets", "loss_of_web", status=1).error
