"""Tests of scaling frontier on a table of runs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.study.format import format_count
from tests.laws.published import read_gadre
from tests.report.frontier_study import LAW, RUNS
from tests.tools.conftest import read_traces


def test_the_optimum_of_a_table_is_that_of_its_law(cli, tmp_path: Path) -> None:
    """The table also has rows of another corpus."""
    other = RUNS.assign(corpus="code", loss=1.5 * RUNS["loss"] / RUNS["n_params"] ** 0.1)
    pd.concat([RUNS.assign(corpus="c4"), other]).to_csv(tmp_path / "table.csv", index=False)
    words = ("--flops-by", "train_flops", "--where", "corpus == 'c4'", "--budgets", 1e12, 2e13)
    words += ("--out", tmp_path / "law.json", "--plot", tmp_path / "frontier.html")
    output = cli("frontier", tmp_path / "table.csv", *words).output
    assert json.loads((tmp_path / "law.json").read_text())["params"] == pytest.approx(LAW.params, rel=1e-3)
    for flops, start in ((1e12, "1.00e+12"), (2e13, "2.00e+13")):
        (line,) = (line for line in output.splitlines() if line.strip().startswith(start))
        at = LAW.optimum(flops)
        assert {format_count(at.N, 3), f"{at.loss:.3f}"} <= set(line.split())
    best = read_traces(tmp_path / "frontier.html")[1]
    assert best["y"] == pytest.approx([LAW.optimum(flops).N for flops in (1e12, 2e13)], rel=1e-3)


def test_a_table_beside_its_study_has_the_drift_of_the_study(cli, tmp_path: Path) -> None:
    RUNS.to_csv(tmp_path / "table.csv", index=False)
    words = ("frontier", tmp_path / "table.csv", "--out", tmp_path / "law.json", "--budgets", 1e15)

    def read_width() -> float:
        line = next(line for line in cli(*words).output.splitlines() if line.strip().startswith("1.00e+15"))
        low, high = re.findall(r"([\d.]+) to ([\d.]+)", line)[-1]  # of the loss
        return float(high) - float(low)

    default = read_width()
    (tmp_path / "study.yaml").write_text(
        """{name: a, directory: ., slope_drift: 0.05, run: {dataset: {path_train: c4, path_eval: c4}},
        sizes: {x: {d_model: 16, d_ff: 16, n_heads: 2, n_layers: 1}}, cells: [{size: x, tokens: 1000}]}"""
    )
    assert read_width() > 1.5 * default


def test_a_misspelled_size_is_no_recipe(cli, tmp_path: Path) -> None:
    RUNS.rename(columns={"n_params": "params"}).to_csv(tmp_path / "table.csv", index=False)
    error = cli("frontier", tmp_path / "table.csv", "--out", tmp_path / "law.json", status=1).error
    assert "no column 'n_params'; did you mean 'params'?" in error


def test_a_table_without_sizes_is_one_recipe(cli, tmp_path: Path) -> None:
    compute = np.geomspace(1e16, 1e17, 7)
    loss = 1.9 + 2.2 * (compute / 1e16) ** -0.16
    pd.DataFrame({"flops": compute, "loss": loss}).to_csv(tmp_path / "points.csv", index=False)
    words = ("frontier", tmp_path / "points.csv", "--flops-by", "flops", "--out", tmp_path / "law.json")
    output = cli(*words, "--budgets", 1e18, 1e23, "--plot", tmp_path / "recipe.html").output
    assert "7 points of one recipe, C = 1.00e+16 to 1.00e+17 FLOPs" in output
    near, far = (
        line.split() for line in output.splitlines() if line.strip().startswith(("1.00e+18", "1.00e+23"))
    )
    low, high = float(near[-3]), float(near[-1])
    # E + K C^-g itself is inside; the table names what is too wide to be a forecast
    assert low < 1.9 + 2.2 * 100**-0.16 < high and "forecast" not in near
    assert " ".join(far[-4:-2]) == "no forecast,"
    assert "Forecasts within 10% reach" in output
    assert read_traces(tmp_path / "recipe.html")[-1]["mode"] == "markers"
    # rows with held_out = 1 are compared and not fitted
    more = {"flops": [*compute, 1e18, 1e19], "loss": [*loss, 1.9 + 2.2 * 100**-0.16, 9.0]}
    more = {"flops": [*more["flops"], 1e15], "loss": [*more["loss"], 4.0]}  # the last one is no forecast
    # collected tables have the columns of sizes, and empty cells
    table = pd.DataFrame(more | {"held_out": [False] * 7 + [True] * 3, "n_params": math.nan})
    table.to_csv(tmp_path / "points.csv", index=False)
    again = cli(*words, "--plot", tmp_path / "recipe.html").output
    assert "7 points of one recipe" in again
    assert [line.split()[-1] for line in again.splitlines() if line.startswith("not fitted: ")] == [
        "inside",
        "outside",
    ]
    assert read_traces(tmp_path / "recipe.html")[-1]["x"] == pytest.approx([1e18, 1e19, 1e15])
    wrong = cli("frontier", tmp_path / "points.csv", "--out", tmp_path / "law.json", status=1).error
    assert "no column 'train_flops'" in wrong and "--flops-by" in wrong


@pytest.mark.parametrize("text", ["c4_original", "rpj", "rw_original"])
def test_the_far_forecasts_of_the_readme_are_what_the_command_prints(cli, root, laws, tmp_path, text) -> None:
    """Gadre et al., arXiv 2403.08540: 20 tokens per parameter, losses on C4."""
    table = pd.DataFrame(read_gadre(laws)).query(f"dataset_name == '{text}' and tok_mult == '20.0'")
    points = pd.DataFrame(
        {"train_flops": table["flops"].astype(float), "loss": table["loss_c4_val"].astype(float)}
    )
    points.assign(held_out=(points["train_flops"] > 1e20).astype(int)).to_csv(
        tmp_path / "points.csv", index=False
    )
    output = cli("frontier", tmp_path / "points.csv", "--out", tmp_path / "law.json").output
    readme = " ".join((root / "README.md").read_text().split())
    lines = [line for line in output.splitlines() if line.startswith("not fitted")]
    assert len(lines) == 2
    for line in lines if text == "c4_original" else lines[1:]:
        times, predicted, measured = re.search(
            r", ([\d.]+) times.*predicted (.*), measured (.*), inside", line
        ).groups()
        assert f"{float(times):.0f} times" in readme and f"{predicted}, measured {measured}" in readme
