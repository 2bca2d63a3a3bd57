"""Studies: cells and the runs that they expand to, rules for rates, shared trunks, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.plan.conventions import training_flops_per_token
from megatron.plan.count import flops_per_token, n_non_embedding, n_params
from megatron.study.ladder import CONVENTIONS, PlannedRun, expand_study, read_study_plan, select_runs_of_part
from megatron.study.price import makespan
from tests.study.conftest import SHARED_TRUNK
from tests.wrong_values import read_refusal

CELLS = """
  objective: autoregressive, size: [small, wide], tokens: [640, 1280], seeds: [0, 1]},
  {objective: [autoregressive, masked_diffusion], size: small, tokens: 1.28e3
"""


def test_cells_are_products_and_a_duplicate_run_is_planned_once(runs_of) -> None:
    runs = runs_of(CELLS)
    # 2 sizes x 2 budgets x 2 seeds, and of the second entry only the diffusion run is new
    assert len(runs) == 9
    assert len({run.folder for run in runs}) == 9
    assert [run.plan.train_flops for run in runs] == sorted(run.plan.train_flops for run in runs)
    longest = runs[-1]
    assert longest.config.name == "autoregressive-wide-1.28ktok-seed1"
    assert longest.folder.name == f"{longest.config.name}-{longest.plan.identity[:8]}"
    assert (longest.plan.n_steps, longest.plan.epochs) == (20, 0.02)
    assert longest.plan.train_flops == flops_per_token(longest.config.model, 16) * 1280


def test_names_have_repetition_and_labels_which_may_be_numbers(runs_of) -> None:
    (repeated,), (labelled,) = (runs_of(f"size: small, {c}") for c in ("epochs: 3", "tokens: 640, label: 2"))
    assert repeated.config.name == "autoregressive-small-192ktok-3ep-seed0"
    assert labelled.config.name == "autoregressive-small-640tok-seed0-2"


def test_a_part_has_the_runs_of_its_cells_and_the_trunks_that_these_continue(study_file: Path) -> None:
    cells = "{size: small, tokens: [640, 1280], part: one}, {size: small, tokens: [1280, 2560], part: two}"
    plan = read_study_plan(study_file, [f"cells=[{cells}]", SHARED_TRUNK])
    runs = expand_study(plan)

    def tokens(part: str | None) -> list[int]:
        return [run.plan.train_tokens for run in select_runs_of_part(plan, runs, part)]

    assert tokens(None) == [640, 1280, 2560]
    assert tokens("two") == [1280, 2560]
    assert tokens("one") == [640, 1280, 2560]  # both continue the longest run
    with pytest.raises(
        ValueError, match="--part: got three, expected one of the parts of study tiny: one, two"
    ):
        select_runs_of_part(plan, runs, "three")


def test_the_study_as_saved_plans_the_same_runs(study_file: Path) -> None:
    plan = read_study_plan(study_file, [f"cells=[{{{CELLS}}}]", "run.optim.lr=0.01"])
    plan.save()
    saved = read_study_plan(plan.directory / "study.yaml")
    assert saved == plan
    runs, again = expand_study(plan), expand_study(saved)
    assert [run.plan.identity for run in again] == [run.plan.identity for run in runs]
    assert {run.config.optim.lr for run in again} == {0.01}


def test_the_run_keys_of_a_cell_override_those_of_the_study(runs_of) -> None:
    (run,) = runs_of("size: small, tokens: 640, run: {optim: {lr: 0.5}}", "run.optim.weight_decay=0.3")
    assert (run.config.optim.lr, run.config.optim.weight_decay) == (0.5, 0.3)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("nmae=x", "unknown key 'nmae'; did you mean 'name'?"),
        ("grids=[{sizes: [small]}]", "study.yaml.grids: got a key of an earlier version. Use cells"),
        ("cells=[{size: best, tokens: 640}]", "cells[0].size: got best with more values"),
        ("cells=[{size: [best, small], flops: 1e9}]", "expected one size, flops and seed"),
        ("cells=[{size: best, flops: 1e9}, {size: best, flops: 2e9}]", "got several entries of size best"),
        ("sizes.small=5", "sizes.small: got 5, expected keys such as d_model"),
        # of a run
        (
            "cells=[{size: 425, tokens: 640}]",
            "run autoregressive-425: got an unknown size '425'; did you mean '425M'?",
        ),
        (
            "cells=[{size: smal, tokens: 640}]",
            "run autoregressive-smal: got an unknown size 'smal'; did you mean 'small'?",
        ),
        # of a cell
        ("tokens: 640, flops: 1e9", "got tokens, flops, expected two of D, unique_tokens and epochs"),
        ("tokens: 640, unique_tokens: 64, epochs: 2", "got tokens, unique_tokens, epochs, expected two"),
        ("unique_tokens: 64", "cells[0].tokens: got None"),
        ("tokens: 640, lr: fast", "cells[0].lr[0]: got 'fast', expected a number, steplaw"),
        ("tokens: 640, lr: {coefficient: 1, N: 2}", "unknown key 'N'"),
        ("tokens: 640, lr: {coefficient: -1}", "lr[0].coefficient: got -1, expected a number"),
        ("tokens: 640, lr: {mup: 1}", "Use run: {model: {parametrization: mup, ...}}"),
        ("tokens: 640, seeds: 0", "cells[0].seeds: got 0, expected a list of seeds"),
        ("tokens: 640, seeds: true", "cells[0].seeds: got True, expected a list of seeds"),
        ("tokens: 640, seeds: [0.5]", "cells[0].seeds: got 0.5, expected integers"),
        ("unique_tokens: 64, epochs: -1", "epochs: got -1, expected numbers above 0"),
        ("tokens: 1.5", "expected integers"),
        ("tokens: 640, batch_tokens: [64]", "Use run: {dataset: {batch_size: ...}}."),
    ],
)
def test_a_wrong_study_run_or_cell_is_one_sentence(study_file: Path, word: str, sentence: str) -> None:
    word = f"cells=[{{size: small, {word}}}]" if ": " in word and "=" not in word else word
    assert sentence in str(read_refusal(lambda: expand_study(read_study_plan(study_file, [word]))))


def test_the_longest_first_on_two_lanes() -> None:
    assert makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2) == 7.0  # 3 + 2 + 2 beside 3 + 2
    assert makespan([5.0], 4) == 5.0


@pytest.mark.parametrize(
    "name", ["a\nb", "a b", "a/b", "..", "-a", "a\0", "$(id)", "a;b", "x" * 201, "\u00e9", ""]
)
def test_a_name_that_is_unsafe_in_a_list_of_folders_is_refused(study_file: Path, name: str) -> None:
    """A task of an array reads its run's folder from a line of a list, and the name is part of that line."""
    written = json.dumps(name)
    for word, key in (
        (f"sizes={{{written}: {{d_model: 16, n_heads: 2, n_layers: 1}}}}", "sizes"),
        (f"cells=[{{size: small, tokens: 640, label: {written}}}]", "label"),
        (f"cells=[{{size: {written}, tokens: 640}}]", "size"),
    ):
        if key != "sizes" and not name:
            continue  # no label, and not the name of a size
        message = str(read_refusal(lambda: expand_study(read_study_plan(study_file, [word]))))  # noqa: B023
        assert "got the name" in message and key in message


def test_runs_of_one_budget_spend_it_whatever_their_size(runs_of) -> None:
    for convention in CONVENTIONS:
        grid = "size: [small, wide], flops: [1e9, 3e9]"
        for run in runs_of(grid, f"flops_convention={convention}"):
            per_token = training_flops_per_token(run.config.model, 16)[convention]
            budget = 1e9 if run.plan.train_tokens * per_token < 2e9 else 3e9
            # to whole steps of 64 tokens
            assert abs(run.plan.train_tokens - budget / per_token) <= 32
    (run,) = runs_of("size: small, flops: [1e9]")
    assert training_flops_per_token(run.config.model, 16)["exact"] == flops_per_token(run.config.model, 16)


@pytest.mark.parametrize(
    ("cell", "lengths"),
    [
        ("unique_tokens: [640, 1280], epochs: [1, 2, 10]", {(u, e) for u in (640, 1280) for e in (1, 2, 10)}),
        ("epochs: [3]", {(64000, 3)}),  # the whole corpus
        ("tokens: [6400], unique_tokens: [640, 3200]", {(640, 10), (3200, 2)}),
        # 400 samples over 1, 4 and 7 epochs: 400, 100 and 57.1 -> 58 of them unique
        ("tokens: [6400], epochs: [1, 4, 7]", {(6400, 1), (1600, 4), (58 * 16, 400 / 58)}),
    ],
)
def test_two_of_tokens_unique_tokens_and_epochs_give_the_third_exactly(runs_of, cell, lengths) -> None:
    runs = runs_of(f"size: small, {cell}")
    assert {(run.plan.unique_tokens, run.plan.epochs) for run in runs} == lengths and len(runs) == len(
        lengths
    )
    assert all(run.plan.train_tokens == round(run.plan.unique_tokens * run.plan.epochs) for run in runs)


def test_a_rule_is_its_formula_at_the_size_and_length_of_each_run(runs_of) -> None:
    # arXiv 2503.04715: lr 1.79 N^-0.713 D^0.307, N without embeddings
    grid = "size: [small, wide], tokens: [3200, 12800]"
    for words in ((grid, "run.optim={lr: steplaw}"), (f"{grid}, lr: steplaw",)):
        for run in runs_of(*words):
            D = float(run.config.lr_scheduler.total_tokens)
            lr = 1.79 * n_non_embedding(run.config.model) ** -0.713 * D**0.307
            assert run.config.optim.lr == pytest.approx(lr, rel=1e-5)
    (run,) = runs_of("size: small, tokens: 640, lr: [{coefficient: 2, n: -0.5, params: all}]")
    assert run.config.optim.lr == pytest.approx(2 * n_params(run.config.model) ** -0.5, rel=1e-5)


def test_the_rate_of_a_cell_precedes_that_of_the_study(runs_of) -> None:
    runs = runs_of("size: small, tokens: 640, lr: [0.25, steplaw]", "run.optim={lr: steplaw}")
    names = [run.config.name for run in runs if run.config.optim.lr == 0.25]
    assert names == ["autoregressive-small-640tok-lr0.25-seed0"] and len(runs) == 2


def group_seeds(runs: list[PlannedRun]) -> dict[tuple[str, int], list[int]]:
    seeds_by_cell: dict[tuple[str, int], list[int]] = {}
    for run in runs:
        seeds_by_cell.setdefault((run.plan.size, run.plan.train_tokens), []).append(run.plan.seed)
    return {cell: sorted(seeds) for cell, seeds in seeds_by_cell.items()}


def test_a_number_of_seeds_counts_from_0_and_a_cell_that_is_listed_again_has_more(runs_of) -> None:
    assert group_seeds(runs_of("size: small, tokens: 640, seeds: 3")) == {("small", 640): [0, 1, 2]}
    runs = runs_of("size: [small, wide], tokens: 640}, {size: wide, tokens: 640, seeds: [0, 4]")
    assert group_seeds(runs) == {("small", 640): [0], ("wide", 640): [0, 4]}


def test_runs_that_differ_in_their_seed_alone_share_a_cell_and_others_do_not(runs_of) -> None:
    runs = runs_of("size: [small, wide], tokens: 640, lr: [0.01, 0.02], seeds: 2")
    cells = {(run.plan.size, run.config.optim.lr): run.plan.cell_identity for run in runs}
    assert len(set(cells.values())) == len({run.plan.cell_identity for run in runs}) == 4


def test_a_run_that_one_entry_holds_out_is_held_out(runs_of) -> None:
    runs = runs_of("size: [small, wide], tokens: 640}, {size: wide, tokens: 640, held_out: true")
    assert {run.plan.size: run.held_out for run in runs} == {"small": False, "wide": True}


def wsd_schedule(**more: Any) -> str:
    keys = {"kind": "wsd", "decay_fraction": 0.2, "warmup_iterations": 2, **more}
    return "run: {lr_scheduler: {" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}}"


def test_runs_of_several_lengths_branch_from_the_longest_before_they_decay(runs_of) -> None:
    short, middle, trunk = runs_of(f"size: small, tokens: [640, 1280, 2560], {wsd_schedule()}")
    # 10, 20 and 40 steps: their last fifths decay
    assert (short.branch.step, middle.branch.step, trunk.branch) == (8, 16, None)
    assert short.branch.trunk == middle.branch.trunk == trunk.folder
    assert trunk.config.checkpoint.chkpt_at == [8, 16]
    assert (short.trained_steps, middle.trained_steps, trunk.trained_steps) == (2, 4, 40)
    assert middle.trained_flops == middle.plan.train_flops / 5


def test_a_decay_longer_than_the_trunk_is_steady_moves_the_branch_back(runs_of) -> None:
    grid = f"size: small, tokens: [2496, 2560], {wsd_schedule()}"
    # 39 steps decay from 31 on, 40 from 32 on
    assert runs_of(grid)[0].branch.step == 31


@pytest.mark.parametrize(
    "grid",
    [
        f"tokens: [640, 2560], {wsd_schedule(kind='cosine', decay_fraction='null')}",
        f"tokens: [640, 2560], {wsd_schedule(warmup_iterations='null', warmup_fraction=0.2)}",
        f"tokens: [640, 2560], lr: steplaw, {wsd_schedule()}",
    ],
    ids=["cosine", "different warm-up", "different rate"],
)
def test_runs_whose_rates_differ_from_the_start_share_nothing(runs_of, grid: str) -> None:
    assert not [run for run in runs_of(f"size: small, {grid}") if run.branch]


def test_trunks_are_not_shared_across_seeds_and_unique_tokens_nor_if_disabled(runs_of) -> None:
    grid = f"size: small, seeds: [0, 1], unique_tokens: [640, 1280], epochs: [1, 2, 4], {wsd_schedule()}"
    runs = runs_of(grid)
    assert len({run.branch.trunk for run in runs if run.branch}) == 4
    assert not [run for run in runs_of(grid, "share_trunks=false") if run.branch]
    names = {run.folder.name for run in runs}
    assert names == {run.folder.name for run in runs_of(grid, "share_trunks=false")}
