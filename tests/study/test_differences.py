"""Differences against the noise floor: arithmetic, scipy, and coverage by simulation."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from megatron.report.difference_text import describe_difference
from megatron.study.differences import (
    Difference,
    compare_best,
    compare_sides,
    estimate_noise_floors,
    find_side,
    group_cells,
)
from megatron.study.table import make_frame, write_table
from tests.laws.known_laws import count_trials, least_hits
from tests.tool_modules import Cli

AR = "autoregressive"


def row_of(cell: str, seed: int, loss: float, **values: object) -> dict[str, object]:
    row = {
        "run": f"ar-{cell}-1Mtok-seed{seed}-{cell}{seed}00", "status": "done", "objective": AR, "cell": cell,
        "seed": seed, "loss": loss, "loss_se": 0.02, "n_tokens_scored": 1000, "train_flops": 1e11,
        "n_params": 10**5, "train_tokens": 10**6,
    }  # fmt: skip
    return row | values


def table_of(*rows: dict[str, object], **losses: list[float]) -> pd.DataFrame:
    """Return a table of rows, and of cells given by the losses of their seeds."""
    cells = [row_of(cell, seed, loss) for cell in losses for seed, loss in enumerate(losses[cell])]
    return make_frame([*rows, *cells])


def compare_runs(
    table: pd.DataFrame, a: str, b: str, paired: tuple[float, float] | None = None
) -> Difference:
    floors = estimate_noise_floors(table)
    return compare_sides(find_side(table, a), find_side(table, b), floors, paired=paired)


LOSSES = {"x": [4.0, 4.1, 4.05], "y": [3.8, 3.9, 3.84]}
TWO = table_of(**LOSSES)


def test_two_cells_are_the_pooled_t_test_of_their_log_losses() -> None:
    a, b = (np.log(TWO.loc[TWO["cell"] == cell, "loss"]) for cell in "xy")
    test = stats.ttest_ind(a, b)
    ends = test.confidence_interval(0.95)
    comparison = compare_runs(TWO, "ar-x", "ar-y")
    assert (comparison.n_a, comparison.n_b, comparison.dof, comparison.verdict) == (3, 3, 4.0, "worse")
    assert comparison.relative_interval == pytest.approx(
        (math.expm1(ends.low), math.expm1(ends.high)), rel=1e-9
    )
    assert comparison.difference == pytest.approx(math.exp(a.mean()) - math.exp(b.mean()))
    assert comparison.interval[0] < comparison.difference < comparison.interval[1]
    assert compare_runs(TWO, "ar-y", "ar-x").verdict == "better"


def test_the_interval_of_sigma_is_by_chi_square() -> None:
    floor = estimate_noise_floors(TWO)[AR]
    s2 = (np.var(np.log([4.0, 4.1, 4.05]), ddof=1) + np.var(np.log([3.8, 3.9, 3.84]), ddof=1)) / 2
    ends = [math.sqrt(4 * s2 / stats.chi2.ppf(q, 4)) for q in (0.975, 0.025)]
    assert floor.sigma == pytest.approx(math.sqrt(s2)) and floor.interval == pytest.approx(tuple(ends))
    assert (floor.dof, floor.source, floor.n_cells, floor.n_runs, floor.text_se) == (4, "seeds", 2, 6, 0.02)


def test_the_error_of_a_shared_text_is_no_part_of_a_difference_and_two_texts_are_not_compared() -> None:
    wide = TWO.assign(loss_se=5.0)
    assert compare_runs(wide, "ar-x", "ar-y").interval == compare_runs(TWO, "ar-x", "ar-y").interval
    other = TWO.assign(n_tokens_scored=TWO["cell"].map({"x": 2000.0, "y": 1000.0}))
    comparison = compare_runs(other, "ar-x", "ar-y")
    assert comparison.verdict == "undecided" and "different texts" in comparison.reason


def test_a_paired_error_over_documents_is_added() -> None:
    comparison = compare_runs(TWO, "ar-x-1Mtok-seed0", "ar-y-1Mtok-seed0", paired=(0.03, 99.0))
    single = estimate_noise_floors(TWO)[AR].sigma ** 2 * 2
    text = 0.03**2 / (4.0 * 3.8)
    assert comparison.se == pytest.approx(math.sqrt(single + text)) and comparison.text_se == 0.03
    assert comparison.dof == pytest.approx((single + text) ** 2 / (single**2 / 4 + text**2 / 99))


def test_without_a_noise_floor_nothing_is_better_and_the_seeds_to_train_are_named() -> None:
    comparison = compare_runs(table_of(x=[9.0], y=[2.0]), "ar-x", "ar-y")
    assert (comparison.verdict, comparison.interval) == ("undecided", None)
    assert "Train more seeds of ar-" in comparison.reason and comparison.reason in describe_difference(
        comparison
    )


def test_runs_of_one_size_and_length_that_differ_in_a_setting_are_not_seeds_of_one_cell() -> None:
    rows = table_of(row_of("x", 0, 4.0), row_of("z", 1, 5.0))  # another learning rate
    assert estimate_noise_floors(rows) == {}
    assert estimate_noise_floors(TWO.assign(cell=None)) == {}  # another program: settings unknown
    assert estimate_noise_floors(TWO.assign(seed=0.0)) == {}  # copies of a run


def test_cells_that_share_trunks_count_the_trunks_once() -> None:
    rows = table_of(x=[4.0, 4.1, 4.05], y=[3.8, 3.9, 3.84])
    shared = rows.assign(trunk=rows["seed"].astype(str))
    assert (estimate_noise_floors(shared)[AR].dof, estimate_noise_floors(rows)[AR].dof) == (2, 4)


def test_a_name_is_a_run_a_cell_or_refused() -> None:
    rows = table_of(row_of("x", 10, 4.2), **LOSSES)
    assert find_side(rows, "ar-x").n_seeds == 4
    assert list(find_side(rows, "ar-x-1Mtok-seed1").runs["seed"]) == [1]  # not seed 10
    assert find_side(rows, "ar-x-1Mtok-seed10-x1000").n_seeds == 1
    for name, words in (("ar", "got 7 matching runs"), ("nobody", "no finished run of that name")):
        with pytest.raises(ValueError, match=words):
            find_side(rows, name)
    with pytest.raises(ValueError, match="share a run"):
        compare_runs(rows, "ar-x", "ar-x-1Mtok-seed1")


def test_several_comparisons_have_the_bonferroni_correction() -> None:
    rows = table_of(x=[4.0, 4.1, 4.05], y=[3.8, 3.9, 3.84], z=[3.9])
    (group,) = compare_best(rows, estimate_noise_floors(rows))
    assert [(difference.a, difference.b, difference.n_comparisons) for difference in group] == [
        ("ar-y-1Mtok", "ar-z-1Mtok-seed0-z000", 3), ("ar-y-1Mtok", "ar-x-1Mtok", 3),
    ]  # fmt: skip
    for difference in group:
        half = stats.t.ppf(1 - 0.05 / 3 / 2, 4) * difference.se
        ends = [math.expm1(math.log1p(difference.relative) + sign * half) for sign in (-1, 1)]
        assert difference.relative_interval == pytest.approx(tuple(ends))
    assert compare_best(TWO.iloc[::3].assign(train_flops=[1e11, 3e11]), {}) == []


SLOW = [pytest.param(*seeds, 200, marks=pytest.mark.slow) for seeds in ((3, 3, 0), (1, 1, 3), (3, 1, 2))]


@pytest.mark.parametrize(("n_a", "n_b", "elsewhere", "n"), [(3, 1, 2, 30), *SLOW])
def test_intervals_cover_a_true_log_ratio_of_2_percent(n_a: int, n_b: int, elsewhere: int, n: int) -> None:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(n):
        noise = 0.01 * rng.normal(size=n_a + n_b + elsewhere)
        a, b, c = np.split(noise, [n_a, n_a + n_b])
        rows = table_of(x=list(4 * np.exp(a)), y=list(4 * np.exp(b - 0.02)), z=list(3 * np.exp(c)))
        cells = {cell.name[:4]: cell for cell in group_cells(rows)}
        low, high = compare_runs(rows, cells["ar-x"].name, cells["ar-y"].name).relative_interval
        hits += low <= math.expm1(0.02) <= high
    assert hits >= max(least_hits(n), 0.91 * n if n > 30 else 0) and (n == 30 or hits <= 0.99 * n)


@count_trials(30, 100)
def test_the_best_of_five_equal_runs_is_called_better_in_at_most_5_percent_of_studies(n: int) -> None:
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(n):
        L = 4 * np.exp(0.01 * rng.normal(size=8))
        rows = table_of(a=[L[0]], b=[L[1]], c=[L[2]], d=[L[3]], e=[L[4]], z=list(L[5:]))
        rows.loc[rows["cell"] == "z", "train_flops"] = 1e12
        (group,) = compare_best(rows, estimate_noise_floors(rows))
        wrong += any(difference.verdict != "undecided" for difference in group)
    assert wrong / n <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / n)


def test_the_command_prints_table_sentence_and_json(cli: Cli, tmp_path: Path) -> None:
    path = write_table(TWO, tmp_path / "table.csv")
    printed = cli("compare", path, "ar-y", "ar-x").output
    assert "Noise floor: autoregressive runs" in printed and "ar-y-1Mtok is better than ar-x-1Mtok" in printed
    answer = json.loads(cli("compare", path, "--best", "--json").output)
    assert answer["noise_floor"][AR]["dof"] == 4 and answer["differences"][0]["verdict"] == "better"
    assert "no finished run" in cli("compare", path, "ar-y", "ar-q", status=1).error


def test_a_pattern_selects_a_labelled_cell_whose_name_has_the_label() -> None:
    rows = [
        row_of(
            label,
            seed,
            4.0 + 0.01 * seed,
            run=f"ar-1Mtok-seed{seed}-{label}-{label}{seed}00",
            identity=f"{label}{seed}00",
        )
        for label in ("one", "two")
        for seed in range(2)
    ]
    side = find_side(make_frame(rows), "*-seed?-two-*")
    assert (side.n_seeds, side.name) == (2, "ar-1Mtok-two")
    with pytest.raises(ValueError, match="got 4 matching runs"):
        find_side(make_frame(rows), "*-seed?-*")
