import dataclasses

import pytest
from megatron.study.run_row import (
    COLUMNS,
    NUMBERS,
    PLAN_COLUMNS,
    FinishedRow,
    RunRow,
    select_finished,
    select_scored,
)

# the format of table.csv, which other programs read: columns are added at the end only
CSV_COLUMNS = [
    "run",
    "identity",
    "status",
    "objective",
    "size",
    "seed",
    "n_params",
    "n_non_embedding",
    "train_tokens",
    "unique_tokens",
    "epochs",
    "train_flops",
    "flops_6nd",
    "seq_len",
    "loss",
    "loss_se",
    "n_tokens_scored",
    "wall_s",
    "tps",
    "path",
    "annealed",
    "held_out",
    "trunk",
    "cell",
    "test_loss",
    "test_loss_se",
]
TEXTS = {"run", "identity", "status", "objective", "size", "path", "trunk", "cell"}


def test_the_fields_are_the_columns_of_the_table_in_their_order() -> None:
    assert COLUMNS == CSV_COLUMNS
    assert set(COLUMNS) - NUMBERS == TEXTS
    assert set(PLAN_COLUMNS) == {"identity", *CSV_COLUMNS[3:14]}
    hints = {field.name: str(field.type) for field in dataclasses.fields(RunRow)}
    assert all(("float" in hints[name]) == (name in NUMBERS) for name in COLUMNS)


def test_cells_are_read_by_name_and_scores_by_their_prefix() -> None:
    row = RunRow(run="a", size="1M", n_params=10, scores={"quiz": 0.5}, note="word")
    assert [row.value(name) for name in ("run", "n_params", "loss", "score_quiz", "score_x")] == [
        "a", 10, None, 0.5, None,
    ]  # fmt: skip
    assert row.value("note") is None and row.value("scores") is None and row.value("other") is None
    assert (row.number("n_params"), row.number("size"), row.number("score_quiz")) == (10, None, 0.5)


@pytest.mark.parametrize(("trunk", "is_branch"), [(None, False), ("", False), ("a", False), ("b", True)])
def test_a_branch_has_the_trunk_of_another_run(trunk: str | None, is_branch: bool) -> None:
    assert RunRow(run="a", trunk=trunk).is_branch == is_branch


def test_finished_rows_have_a_size_tokens_and_a_loss() -> None:
    done = RunRow(run="a", status="done", n_params=10, train_tokens=20, loss=3.0, cell="x")
    (row,) = select_finished(
        [done, dataclasses.replace(done, status="failed"), dataclasses.replace(done, loss=None)]
    )
    assert (row.run, row.n_params, row.train_tokens, row.loss, row.cell) == ("a", 10, 20, 3.0, "x")
    assert row.objective == "" and select_finished([row]) == [row]
    with pytest.raises(TypeError, match="loss"):
        FinishedRow(run="a", objective="", n_params=10, train_tokens=20)


def test_scored_rows_are_finished_or_of_a_table_without_a_status() -> None:
    rows = [
        RunRow(run="a", status=status, loss=loss)
        for status in ("done", None, "failed")
        for loss in (2.0, 0.0, None)
    ]
    assert [(row.status, row.loss) for row in select_scored(rows)] == [("done", 2.0), (None, 2.0)]
