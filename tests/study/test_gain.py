"""The commands `gain` and `compare --until`: tables, JSON, figures, decisions and refusals."""

import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.laws.compute_law import fit_compute_law
from megatron.report.gain_text import describe_cell_gain
from megatron.study.decision import decide
from megatron.study.differences import compare_sides, estimate_noise_floors, find_side
from megatron.study.gain import cell_gain
from megatron.study.table import make_frame, write_table
from tests.tool_modules import Cli

AR = "autoregressive"
SIZES = (50e3, 100e3, 200e3, 400e3)


def recipe_row(recipe: str, N: float, seed: int, loss: float, **values: object) -> dict[str, object]:
    name = f"{recipe}-{N / 1e3:.0f}k"
    row = {
        "run": f"ar-{name}-seed{seed}", "identity": f"{name}{seed}", "status": "done", "objective": AR,
        "cell": name, "seed": seed, "n_params": int(N), "train_tokens": int(20 * N),
        "train_flops": 120 * N * N, "loss": loss,
    }  # fmt: skip
    return row | values


@pytest.fixture
def ladders(tmp_path: Path) -> Path:
    """Write a table of two recipes at four sizes, three seeds; B needs 0.8 times the compute of A."""
    rng, rows = np.random.default_rng(3), []
    for N in SIZES:
        for seed in range(3):
            order = rng.normal()  # of the data, common to both recipes
            for recipe, ratio in (("a", 1.0), ("b", 0.8)):
                loss = 2 + 2.2 * (120 * N * N / ratio / 1e13) ** -0.15
                rows.append(recipe_row(recipe, N, seed, loss * math.exp(0.003 * order + 3e-4 * rng.normal())))
    path = tmp_path / "table.csv"
    write_table(make_frame(rows), path)
    return path


def test_gain_prints_the_share_of_compute_and_its_trend(ladders: Path, cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "gain.html"
    out = cli("gain", ladders, "ar-a-*", "ar-b-*", "--plot", page).output
    *_, headline, noise = out.strip().splitlines()
    assert headline.startswith("B needs 0.81 times the FLOPs of A (95 %: 0.79 to 0.82), at 1.9e13; ")
    assert "no change with size is shown" in headline
    assert float(noise.rsplit(maxsplit=1)[1]) > 0.95  # "pairs correlate by 0.99"
    assert "share of A's FLOPs" in page.read_text()


def test_gain_as_json_has_the_numbers_of_the_table(ladders: Path, cli: Cli) -> None:
    at = ["--at", "1e12", "1e15"]
    record = json.loads(cli("gain", ladders, "ar-a-*", "ar-b-*", "--json", *at).output)
    assert [gain["C"] for gain in record["gains"]] == [1e12, 1e15]
    assert record["gains"][0]["ratio"] == pytest.approx(0.8, abs=0.01)
    assert record["gains"][0]["verdict"] == "better"
    assert "beyond the runs" in cli("gain", ladders, "ar-a-*", "ar-b-*", *at).output


def test_another_column_of_losses_is_a_recipe(ladders: Path, cli: Cli, tmp_path: Path) -> None:
    frame, table = pd.read_csv(ladders), tmp_path / "ema.csv"
    frame.assign(loss_ema=0.99 * frame["loss"]).to_csv(table)
    out = cli("gain", table, "ar-a-*", "ar-a-*:loss_ema").output
    assert "B: ar-a-*:loss_ema" in out and "better" in out


@pytest.mark.parametrize(
    ("a", "options", "words"),
    [
        ("ar-x-*", [], "no finished run matches"),
        ("ar-a-*:missing", [], "no column 'missing'"),
        ("ar-a-*", ["--by", "train_tokens"], "got 4 sizes, expected one"),
        ("ar-a-50k-*", [], "one budget"),
    ],
)
def test_gain_refuses(ladders: Path, cli: Cli, a: str, options: list[str], words: str) -> None:
    assert words in cli("gain", ladders, a, "ar-b-*", *options, status=1).error


def test_copies_of_runs_are_no_seeds(ladders: Path, cli: Cli, tmp_path: Path) -> None:
    frame = pd.read_csv(ladders)
    pd.concat([frame, frame]).to_csv(tmp_path / "twice.csv", index=False)
    once, twice = (cli("gain", path, "ar-a-*", "ar-b-*").output for path in (ladders, tmp_path / "twice.csv"))
    assert once == twice


def test_until_refuses_what_it_cannot_compare(ladders: Path, cli: Cli) -> None:
    cell = ["compare", ladders, "ar-a-100k", "ar-a-100k", "--until", "0.5%"]
    assert "expected two different cells" in cli(*cell, status=1).error
    for flags in (["a", "b", "--paired"], ["--best", "--until", "1%"]):
        assert "expected --paired with --until" in cli("compare", ladders, *flags, status=2).error


def test_until_names_a_seed_where_the_runs_have_none() -> None:
    rows = [recipe_row("a", 1e5, seed, 3.5 * (1 + 0.001 * seed)) for seed in range(3)]
    rows += [recipe_row(name, 5e4, 0, 4.0) | {"seed": None} for name in "ab"]
    table = make_frame(rows)
    sides = (find_side(table, f"ar-{name}-50k-seed0") for name in "ab")
    decision = decide(*sides, estimate_noise_floors(table), 1e-5)
    assert (decision.verdict, decision.next_seed) == ("undecided", 0)


def test_until_stops_with_a_decision_or_names_the_next_seed(ladders: Path, cli: Cli) -> None:
    words = cli("compare", ladders, "ar-a-50k", "ar-b-50k", "--until", "0.5%").output
    assert "Decided: ar-a-50k is worse." in words
    words = cli("compare", ladders, "ar-a-50k", "ar-b-50k", "--until", "0.5%", "--paired").output
    assert "not bounded yet" in words and "Next: train ar-a-50k with seed 3." in words
    record = json.loads(cli("compare", ladders, "ar-a-50k", "ar-b-50k", "--until", "0.5%", "--json").output)
    assert record["verdict"] == "worse" and record["next_seed"] is None


def test_the_next_seed_is_one_that_the_other_cell_has() -> None:
    table = make_frame([
        *(recipe_row("a", 5e4, seed, 4 + 0.001 * seed) for seed in (0, 1, 4)),
        *(recipe_row("b", 5e4, seed, 4 + 0.001 * seed) for seed in (0, 1)),
    ])  # fmt: skip
    decision = decide(find_side(table, "ar-a"), find_side(table, "ar-b"), estimate_noise_floors(table), 1e-5)
    assert (decision.verdict, decision.next_run, decision.next_seed) == ("undecided", "ar-b-50k", 4)


def test_equal_recipes_end_as_equal_once_the_interval_is_within_the_share() -> None:
    rng = np.random.default_rng(0)
    rows = [
        recipe_row(recipe, 5e4, seed, 4 * math.exp(1e-3 * rng.normal()))
        for recipe in "ab"
        for seed in range(12)
    ]
    table = make_frame(rows)
    sides, floors = [find_side(table, f"ar-{recipe}") for recipe in "ab"], estimate_noise_floors(table)
    assert decide(*sides, floors, 0.005).verdict == "equal"
    assert decide(*sides, floors, 0.005, paired=True).verdict == "equal"
    assert decide(*sides, floors, 0.0005).verdict == "undecided"


def test_a_difference_of_two_cells_is_said_in_compute(tmp_path: Path) -> None:
    """The better cell has the loss of 1.1 times the compute, by the exact slope of the law."""
    rng, rows = np.random.default_rng(1), []
    for budget in np.geomspace(1e12, 3e13, 5):
        for offset in (0.35, 0.7, 1.4, 2.8):
            N = math.sqrt(budget / 120) * offset
            D = budget / 6 / N
            loss = 1.7 + 4 / (N / 1e5) ** 0.34 + 2 / (D / 1e6) ** 0.34
            for seed in range(2):
                values = {"train_tokens": int(D), "train_flops": budget, "cell": f"{N:.0f} {D:.0f}"}
                values["run"] = f"ar-{len(rows) // 2}x-seed{seed}"
                rows.append(recipe_row("a", N, seed, loss * math.exp(1e-3 * rng.normal()), **values))
    fitted = make_frame(rows)
    law = fit_compute_law(*(fitted[name] for name in ("n_params", "train_tokens", "loss", "train_flops")))
    loss = rows[0]["loss"]
    assert isinstance(loss, float)
    slope, _ = law.slope(1e12)
    new = {"run": "ar-new-seed0", "cell": "new", "loss": loss * 1.1**slope}
    table = make_frame([*rows, rows[0] | new])
    a, b = find_side(table, "ar-0x-seed0"), find_side(table, "ar-new")
    gain = cell_gain(law, a, b, compare_sides(a, b, estimate_noise_floors(table)))
    assert gain is not None and gain.ratio == pytest.approx(1 / 1.1)
    assert gain.interval[0] < 1 / 1.1 < gain.interval[1] < 1
    assert describe_cell_gain(gain).startswith("In compute: B needs 0.91 times the FLOPs of A (95 %: 0.8")
    assert describe_cell_gain(None) == ""


def test_the_worked_example_shows_the_output_of_its_commands(
    root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    page = (root / "examples_scaling/training/OPTIMIZERS.md").read_text()
    shown = re.findall(r"```sh\nscaling ([^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert [words.split()[0] for words, _ in shown] == ["gain", "gain", "compare"]
    for words, output in shown:
        assert cli(*shlex.split(words)).output == output
