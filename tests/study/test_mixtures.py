"""Mixtures as an axis of a study: planned runs, exact repetition, and the columns of the table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.plan.run_dir import PLAN, RESULT
from megatron.plan.run_plan import plan_run
from megatron.study.importers import read_external_logs
from megatron.study.ladder import PlannedRun, expand_study, read_study_plan
from megatron.study.price import UNKNOWN_SPEED, format_price
from megatron.study.table import read_runs
from tests.datasets import write_dataset

STUDY = """
name: mix
directory: {folder}/study
run:
  dataset: {{path_eval: {folder}/held_out.txt, seq_len: 10, batch_size: 10}}
  model: {{n_tokens: 50, vocab_rows: 64}}
sizes: {{x: {{d_model: 16, d_ff: 16, n_heads: 2, n_layers: 1}}}}
mixtures:
  domains:
    code: {folder}/code_text_document
    web: {folder}/web_text_document
    wiki: {folder}/wiki_text_document unique=200
  weights:
    even: {{code: 1, web: 1, wiki: 1}}
    two: {{code: 3, web: 1}}
  design: {{n: 4, low: {{wiki: 0.1}}, high: {{code: 0.8}}}}
cells: [{cells}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("code", "web", "wiki"):
        write_dataset(tmp_path / f"{name}_text_document", [rng.integers(0, 50, 5001)])
    lines = [f"1 {tmp_path}/{name}_text_document" for name in ("code", "web", "wiki")]
    (tmp_path / "held_out.txt").write_text("\n".join(lines))
    return tmp_path


def plan_runs(folder: Path, cells: str) -> list[PlannedRun]:
    path = folder / "study.yaml"
    path.write_text(STUDY.format(folder=folder, cells=cells))
    return expand_study(read_study_plan(path))


def read_shares(run: PlannedRun) -> dict[str, float]:
    return {corpus.name.split("_")[0]: corpus.share for corpus in run.plan.corpora}


def test_each_mixture_is_a_run_with_exact_shares_and_repetition(folder: Path) -> None:
    runs = {run.config.name: run for run in plan_runs(folder, "{size: x, tokens: 3000, mixture: all}")}
    assert set(runs) == {
        f"autoregressive-x-3ktok-{name}-seed0" for name in ("even", "two", "m1", "m2", "m3", "m4")
    }
    even = runs["autoregressive-x-3ktok-even-seed0"].plan.corpora
    # 300 samples, 100 of each; 200 unique tokens of wiki are 20 samples, read five times
    assert [(corpus.samples, corpus.epochs) for corpus in even] == [(100, 0.2), (100, 0.2), (100, 5.0)]
    assert read_shares(runs["autoregressive-x-3ktok-two-seed0"]) == {"code": 0.75, "web": 0.25}
    for i in range(1, 5):
        shares = read_shares(runs[f"autoregressive-x-3ktok-m{i}-seed0"])
        assert sum(shares.values()) == pytest.approx(1)
        assert shares["wiki"] >= 0.1 and shares.get("code", 0) <= 0.8
    written = Path(str(runs["autoregressive-x-3ktok-two-seed0"].config.dataset.path_train)).read_text()
    assert written == f"3 {folder}/code_text_document\n1 {folder}/web_text_document\n"


def test_the_study_as_saved_has_the_same_mixtures(folder: Path) -> None:
    cells = "{size: x, tokens: 3000, mixture: [m1, even]}"
    runs = plan_runs(folder, cells)
    plan = read_study_plan(folder / "study.yaml")
    plan.save()
    again = expand_study(read_study_plan(plan.directory / "study.yaml"))
    assert [run.plan.identity for run in again] == [run.plan.identity for run in runs]


def test_an_edited_mixture_is_another_run_and_the_earlier_one_keeps_its_file(folder: Path) -> None:
    (run,) = plan_runs(folder, "{size: x, tokens: 3000, mixture: two}")
    path = folder / "study.yaml"
    path.write_text(path.read_text().replace("two: {code: 3, web: 1}", "two: {code: 1, web: 1}"))
    (edited,) = expand_study(read_study_plan(path))
    assert edited.plan.identity != run.plan.identity and edited.folder != run.folder
    assert plan_run(run.config).identity == run.plan.identity
    # the content counts: neither the path of the file, nor the scale and order of the weights
    for word in (f"directory={folder}/moved", "mixtures.weights.two={web: 2, code: 2}"):
        (same,) = expand_study(read_study_plan(path, [word]))
        assert same.plan.identity == edited.plan.identity
        assert same.config.dataset.path_train != edited.config.dataset.path_train


def test_two_names_of_one_mixture_are_one_run_of_the_first_name(folder: Path) -> None:
    text = STUDY.format(folder=folder, cells="{size: x, tokens: 3000, mixture: [two, again]}")
    (folder / "study.yaml").write_text(text)
    weights = "mixtures.weights={two: {code: 3, web: 1}, again: {code: 6, web: 2}}"
    (run,) = expand_study(read_study_plan(folder / "study.yaml", [weights]))
    assert "-two-" in run.config.name


def test_datasets_are_relative_to_the_working_directory_or_a_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = STUDY.format(folder=folder, cells="{size: x, tokens: 3000, mixture: even}")
    text = text.replace(f"code: {folder}/", "code: ").replace(f"web: {folder}/", "web: ${directory}/../")
    (folder / "study.yaml").write_text(text)
    monkeypatch.chdir(folder)
    (run,) = expand_study(read_study_plan("study.yaml"))
    prefixes = [corpus.prefix for corpus in run.plan.corpora[:2]]
    assert prefixes == ["code_text_document", f"{folder}/study/../web_text_document"]


def test_a_cell_without_a_mixture_trains_on_the_dataset_of_the_study(folder: Path) -> None:
    cell = f"{{size: x, tokens: 3000, run: {{dataset: {{path_train: {folder}/web_text_document}}}}}}"
    runs = plan_runs(folder, f"{{size: x, tokens: 3000, mixture: even}}, {cell}")
    assert sorted(len(run.plan.corpora) for run in runs) == [1, 3]


def test_the_price_lists_tokens_and_epochs_of_each_domain(folder: Path) -> None:
    runs = plan_runs(folder, "{size: x, tokens: [600, 3000], mixture: [even, two]}")
    lines = format_price(runs, UNKNOWN_SPEED, 1).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("mixture"))
    assert [line.split() for line in lines[begin + 1 :]] == [
        ["even", "code_text_document", "33.3%", "1k", "0.20"],
        ["even", "web_text_document", "33.3%", "1k", "0.20"],
        ["even", "wiki_text_document", "33.3%", "1k", "5.00"],
        ["two", "code_text_document", "75.0%", "2.25k", "0.45"],
        ["two", "web_text_document", "25.0%", "750", "0.15"],
    ]


def test_columns_of_mixtures_are_read_from_a_csv(tmp_path: Path) -> None:
    header = "run,loss,weight_code,weight_web,epochs_code,loss_of_web"
    (tmp_path / "runs.csv").write_text(f"{header}\na,3.5,0.25,0.75,1.5,4\nb,3.6,1,,,5\n")
    table = read_external_logs([tmp_path / "runs.csv"], "csv", {}, {})
    assert table["weight_code"].tolist() == [0.25, 1.0] and table["weight_web"].tolist() == [0.75, 0.0]
    assert table["epochs_code"].iloc[0] == 1.5 and np.isnan(table["epochs_code"].iloc[1])
    assert table["loss_of_web"].tolist() == [4.0, 5.0]


def test_the_table_has_weights_epochs_and_a_loss_for_each_corpus(folder: Path) -> None:
    runs = plan_runs(folder, "{size: x, tokens: 3000, mixture: [even, two]}")
    for run in runs:
        run.folder.mkdir(parents=True)
        (run.folder / PLAN).write_text(json.dumps(run.plan.as_dict()))
        losses = {"code_text_document": 3.0, "web_text_document": 4.0}
        result = {"identity": run.plan.identity, "loss": 3.5, "loss_by_corpus": losses}
        (run.folder / RESULT).write_text(json.dumps(result))
    table = read_runs(folder / "study").set_index("run")
    two = next(row for name, row in table.iterrows() if "-two-" in str(name))
    assert [two[f"weight_{name}"] for name in ("code", "web", "wiki")] == [0.75, 0.25, 0.0]
    assert two["epochs_code"] == 0.45 and np.isnan(two["epochs_wiki"])
    assert (two["loss_of_code"], two["loss_of_web"]) == (3.0, 4.0)


def test_a_mixture_of_one_domain_is_a_row_of_the_table(folder: Path) -> None:
    text = STUDY.replace("two: {{code: 3, web: 1}}", "pure: {{wiki: 1}}")
    (folder / "study.yaml").write_text(
        text.format(folder=folder, cells="{size: x, tokens: 400, mixture: [even, pure]}")
    )
    for run in expand_study(read_study_plan(folder / "study.yaml")):
        run.folder.mkdir(parents=True)
        (run.folder / PLAN).write_text(json.dumps(run.plan.as_dict()))
    table = read_runs(folder / "study").set_index("run")
    pure = next(row for name, row in table.iterrows() if "-pure-" in str(name))
    assert [pure[f"weight_{name}"] for name in ("code", "web", "wiki")] == [0, 0, 1]
    assert pure["epochs_wiki"] == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("mixture: all", "mixture: [even, ten]"), "mixture: got 'ten'"),
        (("even: {code: 1, web: 1, wiki: 1}", "even: {coed: 1}"), "coed"),
        (("even: {code: 1, web: 1, wiki: 1}", "even: {code: -1}"), "expected weights of 0 or more"),
        (("even: {code: 1, web: 1, wiki: 1}", "even: 3"), "even: got 3, expected keys"),
        (("even: {code: 1, web: 1, wiki: 1}", "even: {code: 0}"), "got no corpus"),
        (("even: {", "m1: {"), "mixtures.weights.m1: got a name of the design"),
        (("even: {", "a/b: {"), "mixtures.weights: got the name 'a/b'"),
        (("    web: ", "    web: 3 # "), "no dataset 3.bin/.idx"),
        (("    web: ", "    web: other/code_text_document # "), "got two datasets of one file name"),
        (("high: {code: 0.8}", "high: {code: most}"), "design.high: got"),
        (("high: {code: 0.8}", "high: {cod: 0.8}"), "did you mean 'code'"),
        (("size: x, tokens: 3000,", "size: best, flops: 1e9,"), "got size best with mixtures"),
        (("mixture: all", "lr: 0.1"), "path_train: missing"),
        (("low: {wiki: 0.1}", "low: {wiki: 2}"), "no mixture meets"),
        (("unique=200", "unique=999999"), "expected dataset.order=epoch and at most"),
        (("n: 4", "n: 2"), "got 2 mixtures of 3 domains"),
    ],
)
def test_wrong_mixtures_are_refused(folder: Path, change: tuple[str, str], words: str) -> None:
    text = STUDY.format(folder=folder, cells="{size: x, tokens: 3000, mixture: all}")
    assert change[0] in text
    (folder / "study.yaml").write_text(text.replace(*change))
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        expand_study(read_study_plan(folder / "study.yaml"))


def test_held_out_losses_of_a_blend_are_listed_by_corpus(folder: Path, cli: Any) -> None:
    """The mean over equal numbers of samples of each corpus is the loss of the run."""
    (run,) = plan_runs(folder, "{size: x, tokens: 200, mixture: even}")
    cli("sweep", folder / "study.yaml")
    result = json.loads((run.folder / RESULT).read_text())
    assert list(result["loss_by_corpus"]) == [f"{name}_text_document" for name in ("code", "web", "wiki")]
    assert np.mean(list(result["loss_by_corpus"].values())) == pytest.approx(result["loss"], abs=1e-3)
