import errno
import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.study.run_row import COLUMNS, RunRow

from megatron.report.report import render_page
from megatron.report.study_data import read_study
from megatron.study import table
from megatron.study.table import MAX_SILENCE_S, read_runs, read_table, write_table

synthetic = runpy.run_path(str(Path(__file__).parents[1] / "report" / "synthetic_study.py"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return synthetic["write_study"](tmp_path_factory.mktemp("study"))


@pytest.fixture
def study(tmp_path) -> Path:
    """Return a study of one run, which tests damage."""
    rng = synthetic["np"].random.default_rng(0)
    synthetic["write_run"](tmp_path, "1M", 524_288, "autoregressive", rng)
    return tmp_path


def only_row(study: Path, later_s: float = 0.0) -> RunRow:
    run = next((study / "runs").iterdir())
    written = [path.stat().st_mtime for path in run.glob("metrics.jsonl")]
    (row,) = read_runs(study, now=max(written, default=0.0) + later_s)
    return row


def find_file(study: Path, name: str) -> Path:
    return next((study / "runs").iterdir()) / name


def test_a_finished_run_has_n_from_its_plan_and_its_loss_from_its_result(study):
    row = only_row(study)
    plan, result = (json.loads(find_file(study, name).read_text()) for name in ("plan.json", "result.json"))
    assert (row.status, row.note) == ("done", "")
    assert all(
        row.value(name) == plan[name] for name in ("n_params", "train_flops", "epochs", "seed", "seq_len")
    )
    assert (row.loss, row.wall_s, row.tps) == (result["loss"], result["wall_s"], result["tps_mean"])
    assert row.path == f"runs/{plan['name']}"


def test_all_runs_are_returned_sorted_by_objective_size_and_tokens(whole):
    rows = read_runs(whole)
    assert len(rows) == 5 * 3 + 2 * 3
    keys = [(row.objective, row.n_params, row.train_tokens) for row in rows]
    assert keys == sorted(keys)


def test_a_run_with_a_partial_line_is_running_and_has_no_loss(study):
    find_file(study, "result.json").unlink()
    with find_file(study, "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 66, "lo')
    row = only_row(study, later_s=1)
    assert (row.status, row.loss) == ("running", None)
    assert "step 64" in row.note


def test_a_run_that_has_long_been_silent_has_failed(study):
    find_file(study, "result.json").unlink()
    row = only_row(study, later_s=MAX_SILENCE_S + 60)
    assert row.status == "failed"
    assert row.note == "Stopped at step 64: no result, and nothing written for 16 minutes."


def test_a_preempt_checkpoint_makes_a_run_preempted(study):
    find_file(study, "result.json").unlink()
    find_file(study, "checkpoints/run.20260101-000000.preempt").mkdir(parents=True)
    assert only_row(study, later_s=1e6).status == "preempted"


def test_a_run_that_is_only_planned_is_missing(study):
    find_file(study, "result.json").unlink()
    find_file(study, "metrics.jsonl").unlink()
    assert only_row(study).status == "missing"


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("plan.json", '{"identity": "a', "plan.json cannot be read"),
        ("plan.json", "[]", "plan.json contains list, expected an object"),
        ("plan.json", '{"identity": "a", "n_params": 1}', "plan.json lacks train_tokens"),
        (
            "plan.json",
            '{"identity": "a", "n_params": "1M", "train_tokens": 1}',
            "n_params is '1M', expected a number",
        ),
        ("result.json", "", "result.json cannot be read"),
        ("result.json", '{"loss": null}', "was not scored"),
        ("result.json", '{"loss": NaN}', "diverged: its held-out loss is nan"),
        ("result.json", '{"loss": 4.0, "identity": "other"}', "result.json is of run other"),
    ],
)
def test_a_damaged_run_fails_with_a_sentence(study, name, text, note):
    find_file(study, name).write_text(text)
    row = only_row(study)
    assert (row.status, row.loss) == ("failed", None)
    assert note in row.note


def test_runs_that_the_study_names_and_that_have_no_directory_are_missing(study, monkeypatch):
    finished = json.loads(find_file(study, "plan.json").read_text())
    other = synthetic["make_plan"]("2M", 524_288, "autoregressive")
    planned = [
        SimpleNamespace(
            plan=SimpleNamespace(
                identity=plan["identity"], cell_identity="c", as_dict=lambda plan=plan: plan
            ),
            held_out=apart,
            folder=Path("runs/planned"),
            branch=None,
        )
        for plan, apart in ((finished, False), (other, True))
    ]
    monkeypatch.setattr(table, "expand_study", lambda _: planned)
    monkeypatch.setattr(table, "read_study_plan", lambda *_: None)
    assert [row.status for row in read_runs(study)] == ["done"]  # without study.yaml missing runs are unknown
    (study / "study.yaml").touch()
    assert [(row.run, row.status, row.held_out) for row in read_runs(study)] == [
        (finished["name"], "done", 0),
        (other["name"], "missing", 1),
    ]


def test_a_study_file_that_cannot_be_read_hides_no_run(study):
    (study / "study.yaml").write_text("grids: [")
    assert [row.status for row in read_runs(study)] == ["done"]


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="got no runs folder"):
        read_runs(tmp_path)


def test_every_number_survives_the_csv_to_its_last_bit(whole, tmp_path):
    rows = read_runs(whole)
    columns = read_table(write_table(rows, tmp_path / "deep" / "table.csv"))
    assert list(columns) == COLUMNS
    for name in ("loss", "loss_se", "train_flops", "epochs", "n_params"):
        assert [float(cell) for cell in columns[name]] == [row.value(name) for row in rows]


def test_an_unknown_number_is_an_empty_cell(study, tmp_path):
    find_file(study, "result.json").unlink()
    columns = read_table(write_table([only_row(study)], tmp_path / "table.csv"))
    assert columns["loss"] == [""]


def test_a_failed_write_keeps_the_old_table_and_leaves_no_other_file(whole, tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_table(read_runs(whole), path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty file"),
        ("a,b,a\n1,2,3\n", "got the column 'a' twice"),
        ("a,b\n1,2\n1\n", "line 3: got 1 cells, expected 2"),
        ("a,b\n1,\xff\n", "t.csv: not a CSV table .*can't decode"),
        (f"a,b\n1,{'2' * (1 << 18)}\n", "t.csv: not a CSV table .*field larger"),
    ],
)
def test_an_invalid_table_is_refused(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "t.csv")


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such table"):
        read_table(tmp_path / "t.csv")


def test_a_published_table_is_read(laws):
    table = next((laws / "chinchilla_epoch").glob("*.csv"))
    columns = read_table(table)
    assert len({len(cells) for cells in columns.values()}) == 1


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("plan.json", "objective", ["autoregressive"]),
        ("plan.json", "size", 5),
        ("plan.json", "size", "two\nlines"),
        ("plan.json", "identity", "\ud800"),
        ("plan.json", "seed", True),
        ("plan.json", "n_params", 10**400),
        ("plan.json", "n_params", 0),
        ("plan.json", "epochs", 1e-320),
        ("plan.json", "unique_tokens", float("nan")),
        ("plan.json", "held_out_unigram_nats", "x"),
        ("result.json", "wall_s", "x"),
        ("result.json", "tps_mean", [1]),
    ],
)
def test_a_value_of_another_type_fails_its_run_and_the_table_and_the_page_are_written(
    study, tmp_path, name, key, value
):
    path = find_file(study, name)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    row = only_row(study)
    assert (row.status, row.loss) == ("failed", None)
    assert row.note.startswith(f"{name}: {key} is ")
    write_table([row], tmp_path / "table.csv")
    table.write_table_parquet([row], tmp_path / "table.parquet")
    assert "<html" in render_page(read_study(study))


def test_metrics_of_other_types_are_skipped(study):
    path = find_file(study, "metrics.jsonl")
    find_file(study, "result.json").unlink()
    odd = [{"kind": [], "step": 1}, {"kind": "train", "step": 2, "elapsed_s": "x", "tps": 10**400}]
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in odd) + "[" * 100_000 + "\n")
    row = only_row(study)
    assert (row.status, row.wall_s, row.tps) == ("running", None, None)
