"""The table of runs: from run folders, to a file and back."""

import errno
import json
import math
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest

from megatron.study import table
from megatron.study.table import COLUMNS, make_frame, read_runs, read_table, select_finished, write_table
from tests.report.synthetic_study import edit_json, make_plan, write_run, write_study


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def study(tmp_path) -> Path:
    """Return a study of one run, which tests damage."""
    write_run(tmp_path, "1M", 524_288, "autoregressive", np.random.default_rng(0))
    return tmp_path


def only_row(study: Path, later_s: float = 0.0) -> pd.Series:
    run = next((study / "runs").iterdir())
    written = [path.stat().st_mtime for path in run.glob("metrics.jsonl")]
    runs = read_runs(study, now=max(written, default=0.0) + later_s)
    assert len(runs) == 1
    return runs.iloc[0]


def find_file(study: Path, name: str) -> Path:
    return next((study / "runs").iterdir()) / name


def test_a_finished_run_has_its_plan_and_its_result(study) -> None:
    row = only_row(study)
    plan, result = (json.loads(find_file(study, name).read_text()) for name in ("plan.json", "result.json"))
    assert (row.status, row.note) == ("done", "")
    assert all(row[name] == plan[name] for name in ("n_params", "train_flops", "epochs", "seed", "seq_len"))
    assert (row.loss, row.wall_s, row.tps) == (result["loss"], result["wall_s"], result["tps_mean"])
    assert row.path == f"runs/{plan['name']}"


def test_the_status_without_a_result_follows_from_the_files(study) -> None:
    find_file(study, "result.json").unlink()
    silent = only_row(study, later_s=table.MAX_SILENCE_S + 60)
    note = "Stopped at step 64: no result, and nothing written for 16 minutes."
    assert (silent.status, silent.note) == ("failed", note)
    with find_file(study, "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 66, "lo')
    running = only_row(study, later_s=1)
    assert running.status == "running" and math.isnan(running.loss) and "step 64" in running.note
    preempted = find_file(study, "checkpoints/run.20260101-000000.preempt")
    preempted.mkdir(parents=True)
    assert only_row(study, later_s=1e6).status == "preempted"
    preempted.rmdir()
    find_file(study, "exit.json").write_text('{"status": 1, "last_words": "error: no luck"}')
    assert tuple(only_row(study)[["status", "note"]]) == ("failed", "Exit status 1: error: no luck")
    find_file(study, "exit.json").unlink()
    find_file(study, "metrics.jsonl").unlink()
    assert only_row(study).status == "missing"


def test_a_damaged_run_fails_with_a_sentence(study) -> None:
    for name, text, note in (
        ("plan.json", '{"identity": "a', "plan.json cannot be read"),
        ("plan.json", "[]", "got list, expected a JSON object"),
        ("plan.json", '{"identity": "a", "n_params": 1}', "plan.json lacks train_tokens"),
        ("result.json", "", "result.json cannot be read"),
        ("result.json", '{"loss": null}', "was not scored"),
        ("result.json", '{"loss": NaN}', "diverged: its held-out loss is nan"),
        ("result.json", '{"loss": 4.0, "identity": "other"}', "result.json is of run other"),
    ):
        path = find_file(study, name)
        valid = path.read_text()
        path.write_text(text)
        row = only_row(study)
        assert row.status == "failed" and math.isnan(row.loss) and note in row.note
        path.write_text(valid)


def test_planned_runs_without_a_directory_are_missing(study, monkeypatch) -> None:
    finished = json.loads(find_file(study, "plan.json").read_text())
    other = make_plan("2M", 524_288, "autoregressive")
    planned = []
    for plan, is_held_out in ((finished, False), (other, True)):
        record = Mock(identity=plan["identity"], cell_identity="c", **{"as_dict.return_value": plan})
        planned.append(Mock(plan=record, held_out=is_held_out, folder=Path("runs/planned"), branch=None))
    monkeypatch.setattr(table, "expand_study", lambda _: planned)
    monkeypatch.setattr(table, "read_study_plan", lambda *_: None)
    assert list(read_runs(study)["status"]) == ["done"]  # without study.yaml missing runs are unknown
    (study / "study.yaml").touch()
    rows = read_runs(study)[["run", "status", "held_out"]].to_numpy().tolist()
    assert rows == [[finished["name"], "done", 0], [other["name"], "missing", 1]]


def test_a_study_file_of_an_earlier_version_hides_no_run(study) -> None:
    rows = read_runs(study).assign(held_out=1.0, trunk="another")
    write_table(rows, study / "table.csv")
    (study / "study.yaml").write_text("grids: [{sizes: [a]}]")
    rows = read_runs(study)
    assert rows[["status", "held_out", "trunk"]].to_numpy().tolist() == [["done", 1, "another"]]
    assert "missing runs cannot be listed" in rows.attrs["warnings"][0]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_all_runs_are_sorted_and_every_number_survives_the_file_to_its_last_bit(
    whole, tmp_path, suffix
) -> None:
    rows = read_runs(whole).assign(score_quiz=0.1)
    assert len(rows) == 5 * 3 + 2 * 3
    keys = ["objective", "n_params", "train_tokens"]
    assert rows[keys].equals(rows[keys].sort_values(keys))
    again = read_table(write_table(rows, tmp_path / "deep" / f"table{suffix}"))
    assert list(again) == [*COLUMNS, "score_quiz"]
    pd.testing.assert_frame_equal(again, rows.drop(columns="note"), check_exact=True)


def test_counts_have_no_decimal_point_and_unknown_values_are_empty_cells(study, tmp_path) -> None:
    find_file(study, "result.json").unlink()
    lines = write_table(read_runs(study), tmp_path / "table.csv").read_text().splitlines()
    cells = dict(zip(*(line.split(",") for line in lines), strict=True))
    plan = json.loads(find_file(study, "plan.json").read_text())
    assert (cells["loss"], cells["annealed"], cells["n_params"]) == ("", "", str(plan["n_params"]))


def test_a_cell_that_is_not_a_number_is_unknown_with_a_warning(tmp_path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("run,loss,depth,kind,seed\n7, 3.5 ,1,x,\n8,oops,2,,1e999\n")
    frame = read_table(path)
    assert frame.dtypes.astype(str).to_dict() == {
        "run": "object", "loss": "float64", "depth": "float64", "kind": "object", "seed": "float64",
    }  # fmt: skip
    assert list(frame["run"]) == ["7", "8"] and list(frame["kind"]) == ["x", None]
    assert frame["loss"].iloc[0] == 3.5 and frame["loss"].isna().iloc[1] and frame["seed"].isna().all()
    assert frame.attrs["warnings"] == [
        "row 2, loss: got 'oops', expected a finite number; 1 such cells count as unknown.",
        "row 2, seed: got '1e999', expected a finite number; 1 such cells count as unknown.",
    ]


def test_held_out_runs_of_pandas_are_held_out(tmp_path) -> None:
    (tmp_path / "t.csv").write_text("run,held_out,muon\na,True,True\nb,False,False\n")
    frame = read_table(tmp_path / "t.csv")
    assert list(frame["held_out"]) == [1, 0] and list(frame["muon"]) == ["True", "False"]
    assert not frame.attrs["warnings"]


def test_finished_runs_are_done_or_without_a_status_and_have_a_loss() -> None:
    statuses, losses = ("done", None, "failed"), (2.0, 0.0, None)
    rows = [{"run": "a", "status": status, "loss": loss} for status in statuses for loss in losses]
    finished = select_finished(make_frame(rows))
    assert finished[["status", "loss"]].to_numpy().tolist() == [["done", 2], [None, 2]]


def test_a_failed_write_keeps_the_old_table_and_leaves_no_other_file(whole, tmp_path, monkeypatch) -> None:
    path = tmp_path / "table.csv"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_table(read_runs(whole), path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_an_invalid_or_missing_table_or_study_is_refused(tmp_path) -> None:
    path = tmp_path / "t.csv"
    with pytest.raises(FileNotFoundError, match="got no runs folder"):
        read_runs(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such table"):
        read_table(path)
    for text, message in (
        ("", "got an empty file"),
        ("a,b,a\n1,2,3\n", "got the column 'a' twice"),
        ("a,b\n1,2\n1\n", "not a CSV or parquet table .*Row #3: Expected 2 columns, got 1"),
        ("a,b\n1,\xff\n", "t.csv: not a CSV or parquet table .*[Ii]nvalid UTF8"),
    ):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=message):
            read_table(path)


def test_a_value_of_another_type_is_unknown_and_the_table_is_written(study, tmp_path) -> None:
    for name, key, value in (
        ("plan.json", "size", "two\nlines"),
        ("plan.json", "seed", True),
        ("plan.json", "n_params", 10**400),
        ("plan.json", "unique_tokens", float("nan")),
        ("result.json", "wall_s", "x"),
        ("result.json", "tps_mean", [1]),
    ):
        edit_json(find_file(study, name), **{key: value})
        row = only_row(study)
        assert row.status == "done" and (key == "size" or math.isnan(row[key.removesuffix("_mean")]))
    for suffix in (".csv", ".parquet"):
        write_table(read_runs(study), tmp_path / f"table{suffix}")


def test_metrics_of_other_types_are_skipped(study) -> None:
    path = find_file(study, "metrics.jsonl")
    find_file(study, "result.json").unlink()
    odd = [{"kind": [], "step": 1}, {"kind": "train", "step": 2, "elapsed_s": "x", "tps": 10**400}]
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in odd) + "[" * 100_000 + "\n")
    row = only_row(study)
    assert row.status == "running" and math.isnan(row.wall_s) and math.isnan(row.tps)
