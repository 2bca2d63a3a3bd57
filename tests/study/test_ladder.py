"""Studies: the runs that they expand to, and the errors for invalid ones."""

import json
from pathlib import Path

import pytest

from megatron.plan.count import flops_per_token
from megatron.study.format import format_duration, format_short
from megatron.study.ladder import expand_study, read_study_plan, select_runs_of_part
from megatron.study.price import makespan

STUDY = """
name: tiny
directory: {folder}/study
run:
  dataset: {{path_train: {folder}/text, seq_len: 16, batch_size: 4}}
  lr_scheduler: {{warmup_iterations: 1}}
sizes:
  small: {{d_model: 16, n_heads: 2, n_layers: 1}}
  wide: {{d_model: 32, n_heads: 2, n_layers: 1}}
cells:
  - {{objective: autoregressive, size: [small, wide], tokens: [640, 1280], seeds: [0, 1]}}
  - {{objective: [autoregressive, masked_diffusion], size: small, tokens: 1.28e3}}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    sidecar = {"tokens": 3201, "tokenizer": {"n_tokens": 300}, "sha256": {"bin": "aa", "idx": "bb"}}
    (tmp_path / "text.json").write_text(json.dumps(sidecar))
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.format(folder=tmp_path))
    return path


def test_cells_are_products_and_a_duplicate_run_is_planned_once(study: Path) -> None:
    runs = expand_study(read_study_plan(study))
    # 2 sizes x 2 budgets x 2 seeds, and of the second entry only the diffusion run is new
    assert len(runs) == 9
    assert len({run.folder for run in runs}) == 9
    assert [run.plan.train_flops for run in runs] == sorted(run.plan.train_flops for run in runs)
    longest = runs[-1]
    assert longest.config.name == "autoregressive-wide-1.28ktok-seed1"
    assert longest.folder.name == f"{longest.config.name}-{longest.plan.identity[:8]}"
    assert (longest.plan.n_steps, longest.plan.epochs) == (20, 0.4)
    assert longest.plan.train_flops == flops_per_token(longest.config.model, 16) * 1280


def test_a_part_has_the_runs_of_its_cells_and_the_trunks_that_these_continue(study: Path) -> None:
    text = study.read_text().replace(
        "{warmup_iterations: 1}", "{kind: wsd, warmup_iterations: 1, decay_fraction: 0.5}"
    )
    text = text[: text.index("cells:")] + (
        "cells:\n"
        "  - {size: small, tokens: [640, 1280], part: one}\n"
        "  - {size: small, tokens: [1280, 2560], part: two}\n"
    )
    study.write_text(text)
    plan = read_study_plan(study)
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


def test_the_study_as_saved_plans_the_same_runs(study: Path) -> None:
    plan = read_study_plan(study, ["run.optim.lr=0.01"])
    plan.save()
    saved = read_study_plan(plan.directory / "study.yaml")
    assert saved == plan
    assert [run.plan.identity for run in expand_study(saved)] == [
        run.plan.identity for run in expand_study(plan)
    ]
    assert {run.config.optim.lr for run in expand_study(saved)} == {0.01}


def test_the_run_keys_of_a_cell_override_those_of_the_study(study: Path) -> None:
    cells = "cells=[{size: small, tokens: 640, run: {optim: {lr: 0.5}}}]"
    run = expand_study(read_study_plan(study, [cells, "run.optim.weight_decay=0.3"]))[0]
    assert (run.config.optim.lr, run.config.optim.weight_decay) == (0.5, 0.3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nmae=x"], "unknown key 'nmae'; did you mean 'name'?"),
        (["grids=[{sizes: [small]}]"], "study.yaml.grids: got a key of an earlier version. Use cells"),
        (["blind={sizes: [small]}"], "Use a cell {size: best, flops: ...}"),
        (["cells=[{size: best, tokens: 640}]"], "cells[0].size: got best with more values"),
        (["cells=[{size: [best, small], flops: 1e9}]"], "expected one size, flops and seed"),
        (["cells=[{size: best, flops: 1e9}, {size: best, flops: 2e9}]"], "got several entries of size best"),
        (["cells=[]"], "cells: got [], expected a list"),
        (["cells=5"], "cells: got 5, expected a list"),
        (["flops_convention=mine"], "got 'mine', expected one of exact, 6nd"),
        (["run=5"], "run: got 5, expected keys"),
        (["sizes=5"], "sizes: got 5, expected keys"),
        (["sizes.small=5"], "sizes.small: got 5, expected keys such as d_model"),
        (["cells"], "'cells': expected section.key=value"),
    ],
)
def test_a_wrong_study_is_one_sentence(study: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_study_plan(study, words)
    assert sentence in str(caught.value)


def test_a_wrong_run_is_named(study: Path) -> None:
    plan = read_study_plan(study, ["cells=[{size: 425, tokens: 640}]"])
    with pytest.raises(ValueError, match="run autoregressive-425: .*did you mean '425M'"):
        expand_study(plan)
    plan = read_study_plan(study, ["cells=[{size: smal, tokens: 640}]"])
    with pytest.raises(ValueError, match="run autoregressive-smal: .*did you mean 'small'"):
        expand_study(plan)
    with pytest.raises(ValueError, match="optim: got 5, expected keys"):
        expand_study(read_study_plan(study, ["run.optim=5"]))
    with pytest.raises(ValueError, match="optim: unknown key 'lrr'"):
        expand_study(read_study_plan(study, ["run.optim.lrr=1"]))
    with pytest.raises(FileNotFoundError, match="no such configuration file"):
        read_study_plan(study.with_name("none.yaml"))


def test_the_longest_first_on_two_lanes() -> None:
    assert makespan([3.0, 3.0, 2.0, 2.0, 2.0], 2) == 7.0  # 3 + 2 + 2 beside 3 + 2
    assert makespan([5.0], 4) == 5.0
    assert [format_duration(s) for s in (9, 300, 7200, 864000)] == [
        "9.0 s",
        "5.0 min",
        "2.0 h",
        "10 d",
    ]
    assert [format_short(n) for n in (12, 250_000, 999_900, 1.28e9)] == ["12", "250k", "1M", "1.28B"]


@pytest.mark.parametrize(
    "name", ["a\nb", "a b", "a/b", "..", "-a", "a\0", "$(id)", "a;b", "x" * 201, "\u00e9", ""]
)
def test_a_name_that_is_unsafe_in_a_list_of_folders_is_refused(study: Path, name: str) -> None:
    """A task of an array reads its run's folder from a line of a list, and the name is part of that line."""
    written = json.dumps(name)
    for words, key in (
        ([f"sizes={{{written}: {{d_model: 16, n_heads: 2, n_layers: 1}}}}"], "sizes"),
        ([f"cells=[{{size: small, tokens: 640, label: {written}}}]"], "label"),
        ([f"cells=[{{size: {written}, tokens: 640}}]"], "size"),
    ):
        if key != "sizes" and not name:
            continue  # no label, and not the name of a size
        with pytest.raises(ValueError, match="got the name") as caught:
            expand_study(read_study_plan(study, words))
        assert key in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["name", "directory"])
def test_a_study_has_one_line_for_a_name_and_a_folder(study: Path, key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}: got .*expected one line"):
        read_study_plan(study, [f'{key}="a\\nb"'])
    with pytest.raises(ValueError, match=f"{key}: got .*expected one line"):
        read_study_plan(study, [f"{key}=[a]"])
