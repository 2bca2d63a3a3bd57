"""Blind check of a study: predict a run, store the prediction, and only then train the run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from megatron.io import code_revision, wait_for_lock
from megatron.laws.compute_law import ComputeLaw, Optimum
from megatron.plan.run_dir import CHECKPOINTS, LOCK, METRICS, PLAN, RESULT
from megatron.study.blind_record import BLIND, BlindPrediction, load_blind
from megatron.study.format import format_count, format_loss, format_with_interval
from megatron.study.ladder import (
    STUDY,
    PlannedRun,
    StudyPlan,
    blind_budget,
    expand_grids,
    plan_candidates,
    read_study_plan,
)
from megatron.study.run_row import FinishedRow, RunRow
from megatron.study.study_frontier import hash_rows, make_frontier_runs, select_rows
from megatron.study.table import read_runs

MAX_SIZE_RATIO = 1.5  # factor between N* and the nearest candidate
REQUIRED_CONSTANTS = ("log_size", "size_exponent")  # constants without which there is no N* to train
MAX_NAMED_RUNS = 3  # runs in a sentence


@dataclass(frozen=True)
class BlindOutcome:
    """Prediction of the blind run and its measured loss.

    measured  held-out loss of the finished run in nats per token; None until it has finished
    loss_se   standard error of `measured`
    in_order  True if no file of the run is older than the prediction; None if the run has no files
    """

    prediction: BlindPrediction
    measured: float | None = None
    loss_se: float | None = None
    in_order: bool | None = None

    @property
    def C(self) -> float:  # noqa: N802
        """FLOPs of the run."""
        return self.prediction.C

    @property
    def N(self) -> int:  # noqa: N802
        """Parameters of the run."""
        return self.prediction.N

    @property
    def D(self) -> int:  # noqa: N802
        """Tokens of the run."""
        return self.prediction.D

    @property
    def predicted(self) -> float:
        """Predicted loss in nats per token."""
        return self.prediction.predicted

    @property
    def interval(self) -> tuple[float, float]:
        """Predictive interval of the measured loss, at `level`."""
        return self.prediction.interval

    @property
    def level(self) -> float:
        """Level of the interval."""
        return self.prediction.level

    @property
    def predicted_at(self) -> str:
        """Time at which the prediction was stored, to the second."""
        return f"{self.prediction.created_at:%Y-%m-%d %H:%M:%S} UTC"

    @property
    def sha256(self) -> str:
        """Hash of all fields of the prediction."""
        return self.prediction.sha256()

    @property
    def in_time(self) -> bool:
        """False if a file of the run is older than the prediction."""
        return self.in_order is not False

    @property
    def error_percent(self) -> float | None:
        """Excess of the measured loss over the predicted loss, in percent; None without a measurement."""
        return None if self.measured is None else 100 * (self.measured / self.prediction.predicted - 1)

    @property
    def inside(self) -> bool | None:
        """True if the measured loss is inside the predictive interval; None without a measurement."""
        low, high = self.prediction.interval
        return None if self.measured is None else low <= self.measured <= high

    @property
    def summary(self) -> str:
        """One-line summary of the check."""
        p = self.prediction
        text = (
            f"blind check at {p.C:.2e} FLOPs, N = {format_count(p.N, 3)}, D = {format_count(p.D, 3)}: "
            f"predicted {format_with_interval(p.predicted, p.interval, format_loss)}"
        )
        if self.measured is None:
            return f"{text}, not trained yet"
        text += f", measured {format_loss(self.measured)}: {'inside' if self.inside else 'OUTSIDE'}, "
        text += f"off by {self.error_percent:+.1f} %"
        return text if self.in_order else f"{text}; NOT BLIND: files of the run are older than the prediction"


def check_blind(study_dir: str | Path, rows: Sequence[RunRow] | None = None) -> BlindOutcome | None:
    """Return the blind check of a study, or None if no run was predicted.

    rows: the rows of `read_runs`, if they were read before
    Raises ValueError if blind.json was modified.
    """
    folder = Path(study_dir)
    prediction = load_blind(folder)
    if prediction is None:
        return None
    has_runs = (folder / "runs").is_dir()
    # read_runs raises FileNotFoundError without a runs folder; a copied blind.json may have none beside it
    rows = (read_runs(folder) if has_runs else []) if rows is None else rows
    matches = [row for row in rows if row.identity == prediction.identity and row.path]
    if not matches:
        return BlindOutcome(prediction)
    # the first match is the run itself: identities are unique within a study
    row = matches[0]
    # a file older than the prediction means that the run had started, so the prediction could have seen its
    # loss
    times = [path.stat().st_mtime for path in (folder / str(row.path)).iterdir() if path.is_file()]
    in_order = min(times) >= prediction.created_at.timestamp() if times else None
    loss = row.loss if row.status == "done" else None
    return BlindOutcome(prediction, loss, row.loss_se if loss is not None else None, in_order)


def predict_blind(study_dir: str | Path, again: bool = False) -> BlindPrediction:
    """Predict the blind run of a study and store the prediction as <study_dir>/blind.json.

    An existing prediction of the same run from the same rows is returned unchanged. A prediction from other
    rows is replaced only with `again`, and only before its run is started.
    Raises FileNotFoundError if there is no study. Raises ValueError if the key `blind` is missing, runs of
    the grids are unfinished or too few, the law does not identify N*, no candidate is near N*, or the run was
    started.
    """
    folder = Path(study_dir)
    if not (folder / STUDY).is_file():
        raise FileNotFoundError(f"{folder / STUDY}: no such study. Run tools/sweep.py STUDY.yaml first.")
    with wait_for_lock(folder / LOCK):  # concurrent predictions could use different laws
        return _predict_locked(folder, again)


def _predict_locked(folder: Path, again: bool) -> BlindPrediction:
    study = read_study_plan(folder / STUDY, [f"directory={folder}"])
    if study.blind is None:
        raise ValueError(
            f"{folder / STUDY}: got no key 'blind', expected the candidate sizes of the blind run. Add "
            "`blind: {sizes: [...]}` to STUDY.yaml and run tools/sweep.py again."
        )
    # expand_grids, not expand_study: the latter includes the run of an earlier prediction, which the check
    # below would report as a run of the grids
    planned = expand_grids(study)
    rows = _select_finished_rows(folder, study, planned)
    law = make_frontier_runs(rows, study.blind.objective, study.blind.flops_column, str(folder)).fit()
    _check_identified(law)
    # budget and candidates depend on the plan alone; the law only chooses among the candidates
    budget = blind_budget(study, planned)
    optimum = law.optimum(budget)
    run = _choose_candidate(study, plan_candidates(study, budget), optimum)
    # the blind run must not be in the fit, or the check would test the law on its own data
    if run.plan.identity in {grid_run.plan.identity for grid_run in planned}:
        raise ValueError(
            f"{folder}: got a blind run, {run.folder.name}, that is also in the grids, expected a new run. "
            "Remove it from the grids."
        )
    prediction = _make_prediction(
        study, run, law, optimum, hash_rows(rows, study.blind.flops_column), len(rows)
    )
    return _store_prediction(folder, prediction, again)


def _store_prediction(folder: Path, prediction: BlindPrediction, again: bool) -> BlindPrediction:
    """Store a prediction and return the one in the file; an earlier one of the same run and rows is kept."""
    earlier = load_blind(folder)
    if earlier is not None:
        # the hash covers N, D, C and loss of every fitted run, so equal hashes give the same law and
        # prediction
        same = (earlier.identity, earlier.rows_sha256) == (prediction.identity, prediction.rows_sha256)
        if same:
            return earlier
        # order of these checks: a started run freezes its prediction, and only `again` replaces one before
        # that
        if files := list_started_files(folder / "runs" / earlier.run):
            raise ValueError(
                f"{folder / BLIND}: got other runs or settings than those of the stored prediction, whose "
                f"run has been started ({files}). Use another directory for a new prediction."
            )
        if not again:
            raise ValueError(
                f"{folder / BLIND}: got other runs or settings than those of the stored prediction, whose "
                "run has not been started. Use --again to replace the prediction."
            )
    if files := list_started_files(folder / "runs" / prediction.run):
        raise ValueError(
            f"{folder / 'runs' / prediction.run}: got a run that has been started ({files}), expected none. "
            "Delete its folder and predict the run before training it."
        )
    # a rename of a complete file: a reader sees the earlier prediction or this one, never a part
    prediction.save(folder)
    return prediction


def list_started_files(run_dir: Path) -> str:
    """Return the names of the files that show that a run was started; empty if there are none."""
    names = [name for name in (PLAN, METRICS, RESULT) if (run_dir / name).exists()]
    checkpoints = run_dir / CHECKPOINTS
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        names.append(CHECKPOINTS)
    return ", ".join(names)


def _select_finished_rows(folder: Path, study: StudyPlan, planned: Sequence[PlannedRun]) -> list[FinishedRow]:
    """Return the rows to fit: all runs of the grids. Raises ValueError if a run has not finished."""
    assert study.blind is not None
    expected_runs = [r for r in planned if r.plan.objective == study.blind.objective and not r.held_out]
    by_identity = {row.identity: row for row in read_runs(folder)}
    status = {identity: row.status for identity, row in by_identity.items()}
    lacking = [r for r in expected_runs if status.get(r.plan.identity) != "done"]
    if lacking:
        notes = [
            f"{r.config.name}: {status.get(r.plan.identity, 'missing')}" for r in lacking[:MAX_NAMED_RUNS]
        ]
        raise ValueError(
            f"{folder}: got {len(lacking)} unfinished runs of the grids ({'; '.join(notes)}), expected all "
            f"{len(expected_runs)} done. Run tools/sweep.py again, or remove runs that cannot be trained "
            "from the grids."
        )
    # The plan decides, not the mark in the table: read_runs also marks a run of the grids that an earlier
    # prediction names, and select_rows would drop it.
    rows = [replace(by_identity[r.plan.identity], held_out=0) for r in expected_runs]
    return select_rows(rows, study.blind.objective, study.blind.flops_column)


def _check_identified(law: ComputeLaw) -> None:
    # alpha and beta may be unidentified: they change the loss away from N*, not N* itself
    reasons = [law.not_identified[name] for name in REQUIRED_CONSTANTS if name in law.not_identified]
    if reasons:
        raise ValueError(
            f"frontier: got no identified N*: {' '.join(reasons)} Add sizes on both sides of the best one at "
            "each budget to the grids, or budgets, then run tools/sweep.py and predict again."
        )


def _choose_candidate(study: StudyPlan, candidates: dict[str, PlannedRun], optimum: Optimum) -> PlannedRun:
    """Return the candidate nearest to N* in log N. Raises ValueError beyond a ratio of MAX_SIZE_RATIO."""

    # ratio, not difference: the cost of a wrong size is symmetric in log N to second order
    def distance(run: PlannedRun) -> float:
        return abs(math.log(run.plan.n_params / optimum.N))

    best = min(candidates.values(), key=distance)
    if distance(best) > math.log(MAX_SIZE_RATIO):
        sizes = ", ".join(f"{name} ({format_count(r.plan.n_params, 3)})" for name, r in candidates.items())
        raise ValueError(
            f"study {study.name}: blind.sizes: got {sizes}, expected one within a factor of "
            f"{MAX_SIZE_RATIO:g} of N* = {format_count(optimum.N, 3)} at {optimum.C:.3g} FLOPs. Add a size "
            "of about that many parameters to sizes and to blind.sizes, and run tools/sweep.py again."
        )
    return best


def _make_prediction(
    study: StudyPlan, run: PlannedRun, law: ComputeLaw, optimum: Optimum, rows_sha256: str, n_runs: int
) -> BlindPrediction:
    assert study.blind is not None
    C = float(getattr(run.plan, study.blind.flops_column))
    # C of the run itself, after rounding to whole steps, and not the nominal budget
    predicted = law.predict_run(run.plan.n_params, C)
    return BlindPrediction(
        objective=study.blind.objective,
        run=run.folder.name,
        size=run.plan.size,
        seed=run.plan.seed,
        identity=run.plan.identity,
        flops_convention=study.blind.flops_convention,
        compute=study.blind.compute,
        budget=optimum.C,
        N=run.plan.n_params,
        D=run.plan.train_tokens,
        C=C,
        predicted=predicted.loss,
        level=predicted.level,
        interval=predicted.predictive,
        N_optimum=optimum.N,
        N_optimum_interval=optimum.N_interval,
        # milliseconds, in UTC: compared with the modification times of the run's files
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        commit=code_revision(),
        n_runs=n_runs,
        rows_sha256=rows_sha256,
    )
