"""Row of a study's table: one run, with a field for each column. Numbers that are not known are None."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SCORE_PREFIX = "score_"  # prefix of additional columns, one per downstream task


def _text(in_plan: bool = False) -> Any:
    """Declare a column of text. in_plan: plan.json of the run has its value."""
    return field(default=None, metadata={"is_number": False, "in_plan": in_plan})


def _number(in_plan: bool = False) -> Any:
    """Declare a column of numbers."""
    return field(default=None, metadata={"is_number": True, "in_plan": in_plan})


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run. The fields, in this order, are the columns of table.csv; `scores` and `note` come after them.

    status               "done", "failed", "missing", "preempted", "running" or "stale"; None in tables of
                         other programs, whose runs count as finished
    train_tokens, FLOPs  as planned, until the run is done
    loss, loss_se        held-out loss in nats per token and its standard error
    path                 relative to the study
    annealed             0 for a run whose learning rate did not decay
    held_out             1 for a run that no law is fitted on
    trunk                the run whose first steps this run shares; the run itself if it shares none
    cell                 equal for runs that differ only in their seed
    test_loss, test_loss_se  the same for dataset.path_test, which was not used to select runs
    scores               downstream scores by task: the columns `score_<task>`
    note                 a sentence on a problem, else ""; not a column
    """

    run: str = field(metadata={"is_number": False, "in_plan": False})
    identity: str | None = _text(in_plan=True)
    status: str | None = _text()
    objective: str | None = _text(in_plan=True)
    size: str | None = _text(in_plan=True)
    seed: float | None = _number(in_plan=True)
    n_params: float | None = _number(in_plan=True)
    n_non_embedding: float | None = _number(in_plan=True)
    train_tokens: float | None = _number(in_plan=True)
    unique_tokens: float | None = _number(in_plan=True)
    epochs: float | None = _number(in_plan=True)
    train_flops: float | None = _number(in_plan=True)
    flops_6nd: float | None = _number(in_plan=True)
    seq_len: float | None = _number(in_plan=True)
    loss: float | None = _number()
    loss_se: float | None = _number()
    n_tokens_scored: float | None = _number()
    wall_s: float | None = _number()
    tps: float | None = _number()
    path: str | None = _text()
    annealed: float | None = _number()
    held_out: float | None = _number()
    trunk: str | None = _text()
    cell: str | None = _text()
    test_loss: float | None = _number()
    test_loss_se: float | None = _number()
    scores: Mapping[str, float] = field(default_factory=dict, hash=False)
    note: str = ""

    def value(self, column: str) -> str | float | None:
        """Return the cell of a column given by name; None if it is empty or not a column of the table."""
        if column.startswith(SCORE_PREFIX):
            return self.scores.get(column.removeprefix(SCORE_PREFIX))
        return getattr(self, column) if column in COLUMNS else None

    def number(self, column: str) -> float | None:
        """Return the cell of a column of numbers given by name; None if it is empty or another column."""
        value = self.value(column)
        return None if isinstance(value, str) else value

    @property
    def is_branch(self) -> bool:
        """True if the first steps are those of another run."""
        return self.trunk not in (None, "", self.run)


COLUMNS = [column.name for column in fields(RunRow) if column.metadata]
NUMBERS = frozenset(column.name for column in fields(RunRow) if column.metadata.get("is_number"))
PLAN_COLUMNS = [column.name for column in fields(RunRow) if column.metadata.get("in_plan")]


def is_number_column(name: str) -> bool:
    """Return whether a column of the table contains numbers."""
    return name in NUMBERS or name.startswith(SCORE_PREFIX)


# field() without a default: a field of this name in the base class has one, which would be inherited
@dataclass(frozen=True, kw_only=True)
class ScoredRow(RunRow):
    """A run with a held-out loss."""

    loss: float = field()


@dataclass(frozen=True, kw_only=True)
class FinishedRow(ScoredRow):
    """A finished run of a study: its size, tokens and held-out loss are known. `objective` may be ""."""

    objective: str = field()
    n_params: float = field()
    train_tokens: float = field()


def select_finished(rows: Iterable[RunRow]) -> list[FinishedRow]:
    """Return the rows with the status "done", whose N, D and loss `table.read_run` requires."""
    return [
        row if isinstance(row, FinishedRow) else FinishedRow(**vars(row) | {"objective": row.objective or ""})
        for row in rows
        if row.status == "done" and None not in (row.n_params, row.train_tokens, row.loss)
    ]


def select_scored(rows: Iterable[RunRow]) -> list[ScoredRow]:
    """Return the rows with a held-out loss above 0, of finished runs and of tables without a status."""
    return [
        row if isinstance(row, ScoredRow) else ScoredRow(**vars(row))
        for row in rows
        if row.loss is not None and row.loss > 0 and row.status in (None, "done")
    ]
