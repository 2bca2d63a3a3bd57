"""Studies: the runs that they expand to, and the errors for invalid ones."""

import json
from pathlib import Path

import pytest

from megatron.plan.count import flops_per_token
from megatron.study.ladder import expand_study, read_study_plan, select_runs_of_part
from megatron.study.price import makespan
from tests.study.conftest import SHARED_TRUNK

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
        ("blind={sizes: [small]}", "Use a cell {size: best, flops: ...}"),
        ("cells=[{size: best, tokens: 640}]", "cells[0].size: got best with more values"),
        ("cells=[{size: [best, small], flops: 1e9}]", "expected one size, flops and seed"),
        ("cells=[{size: best, flops: 1e9}, {size: best, flops: 2e9}]", "got several entries of size best"),
        ("cells=[]", "cells: got [], expected a list"),
        ("cells=5", "cells: got 5, expected a list"),
        ("flops_convention=mine", "got 'mine', expected one of exact, 6nd"),
        ("run=5", "run: got 5, expected keys"),
        ("sizes=5", "sizes: got 5, expected keys"),
        ("sizes.small=5", "sizes.small: got 5, expected keys such as d_model"),
        ("cells", "'cells': expected section.key=value"),
        ('name="a\\nb"', "name: got 'a\\nb', expected one line"),
        ("name=[a]", "name: got ['a'], expected one line"),
        ('directory="a\\nb"', "directory: got 'a\\nb', expected one line"),
        ("directory=[a]", "directory: got ['a'], expected one line"),
        # of a run
        (
            "cells=[{size: 425, tokens: 640}]",
            "run autoregressive-425: got an unknown size '425'; did you mean '425M'?",
        ),
        (
            "cells=[{size: smal, tokens: 640}]",
            "run autoregressive-smal: got an unknown size 'smal'; did you mean 'small'?",
        ),
        ("run.optim=5", "optim: got 5, expected keys"),
        ("run.optim.lrr=1", "optim: unknown key 'lrr'"),
        # of a cell
        ("tokens: 640, flops: 1e9", "got tokens, flops, expected two of D, unique_tokens and epochs"),
        ("tokens: 640, unique_tokens: 64, epochs: 2", "got tokens, unique_tokens, epochs, expected two"),
        ("unique_tokens: 64", "cells[0].tokens: got None"),
        ("tokens: 640, lr: fast", "cells[0].lr[0]: got 'fast', expected a number, steplaw"),
        ("tokens: 640, lr: {coefficient: 1, N: 2}", "unknown key 'N'"),
        ("tokens: 640, lr: {coefficient: -1}", "lr[0].coefficient: got -1, expected a number"),
        ("tokens: 640, lr: {mup: 1}", "Use run: {model: {parametrization: mup, ...}}"),
        ("tokens: 640, held_out: 3", "held_out: got 3, expected true or false"),
        ("tokens: 640, seeds: 0", "cells[0].seeds: got 0, expected a list of seeds"),
        ("tokens: 640, seeds: true", "cells[0].seeds: got True, expected a list of seeds"),
        ("tokens: 640, seeds: [0.5]", "cells[0].seeds: got 0.5, expected integers"),
        ("tokens: 640, seeds: {default: 2}", "cells[0].seeds: got {'default': 2}, expected a list of seeds"),
        ("unique_tokens: 64, epochs: -1", "epochs: got -1, expected numbers above 0"),
        ("tokens: 1.5", "expected integers"),
        ("tokens: 640, sizes: [small]", "cells[0].sizes: got a key of an earlier version. Use size."),
        ("train_tokens: [640]", "Use tokens."),
        ("tokens: 640, batch_tokens: [64]", "Use run: {dataset: {batch_size: ...}}."),
        ("tokens: 640, flops_convention: 6nd", "Use flops_convention of the whole study."),
        ("tokens: 640, depth: 3", "cells[0]: unknown key 'depth'"),
    ],
)
def test_a_wrong_study_run_or_cell_is_one_sentence(study_file: Path, word: str, sentence: str) -> None:
    word = f"cells=[{{size: small, {word}}}]" if ": " in word and "=" not in word else word
    with pytest.raises(ValueError) as caught:
        expand_study(read_study_plan(study_file, [word]))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_study_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such configuration file"):
        read_study_plan(tmp_path / "none.yaml")


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
        with pytest.raises(ValueError, match="got the name") as caught:
            expand_study(read_study_plan(study_file, [word]))
        assert key in str(caught.value) and "\n" not in str(caught.value)
