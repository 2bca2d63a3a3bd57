"""The blind check of a study: a run is predicted, the prediction is stored, and only then is it trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron.io import wait_for_lock
from megatron.revision import git_of_code
from megatron.run_dir import CHECKPOINTS, LOCK, METRICS, PLAN, RESULT
from megatron.scaling import wording
from megatron.scaling.blind_record import BLIND, Blind, load_blind
from megatron.scaling.compute_law import ComputeLaw, Optimum
from megatron.scaling.ladder import (
    STUDY,
    PlannedRun,
    StudyPlan,
    blind_budget,
    expand_grids,
    plan_candidates,
    read_study_plan,
)
from megatron.scaling.study_frontier import hash_rows, runs_of_rows, select_rows
from megatron.scaling.table import Row, read_runs

FURTHEST = 1.5  # factor between N* and the nearest candidate
NEEDED = ("log_size", "size_exponent")  # constants without which there is no N* to train
MOST_NAMED = 3  # runs in a sentence


@dataclass(frozen=True)
class BlindOutcome:
    """A prediction and what was measured.

    measured  held-out loss of the finished run in nats a token, loss_se its standard error; None until then
    in_order  whether no file of the run is older than the prediction; None while there is none
    """

    prediction: Blind
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
        """Loss in nats a token."""
        return self.prediction.predicted

    @property
    def interval(self) -> tuple[float, float]:
        """Predictive, of the measured loss, at `level`."""
        return self.prediction.interval

    @property
    def level(self) -> float:
        """Of the interval."""
        return self.prediction.level

    @property
    def predicted_at(self) -> str:
        """When the prediction was stored, to the second."""
        return f"{self.prediction.made_at:%Y-%m-%d %H:%M:%S} UTC"

    @property
    def sha256(self) -> str:
        """Over all that was predicted."""
        return self.prediction.sha256()

    @property
    def in_time(self) -> bool:
        """Whether no file of the run is known to be older than the prediction."""
        return self.in_order is not False

    @property
    def error_percent(self) -> float | None:
        """By how much the measured loss is above the predicted one."""
        return None if self.measured is None else 100 * (self.measured / self.prediction.predicted - 1)

    @property
    def inside(self) -> bool | None:
        """Whether the measured loss is inside the predictive interval."""
        low, high = self.prediction.interval
        return None if self.measured is None else low <= self.measured <= high

    @property
    def words(self) -> str:
        """The outcome in one line."""
        p = self.prediction
        text = (
            f"blind check at {p.C:.2e} FLOPs, N = {wording.count(p.N, 3)}, D = {wording.count(p.D, 3)}: "
            f"predicted {wording.with_interval(p.predicted, p.interval, wording.loss)}"
        )
        if self.measured is None:
            return f"{text}, not trained yet"
        text += f", measured {wording.loss(self.measured)}: {'inside' if self.inside else 'OUTSIDE'}, "
        text += f"off by {self.error_percent:+.1f} %"
        return text if self.in_order else f"{text}; NOT BLIND: files of the run are older than the prediction"


def check_blind(study_dir: str | Path, rows: Sequence[Row] | None = None) -> BlindOutcome | None:
    """The blind check of a study, None where nothing was predicted. `rows` are those of read_runs, if known.

    ValueError for a blind.json that was changed.
    """
    folder = Path(study_dir)
    prediction = load_blind(folder)
    if prediction is None:
        return None
    has_runs = (folder / "runs").is_dir()
    rows = (read_runs(folder) if has_runs else []) if rows is None else rows
    own = [row for row in rows if row["identity"] == prediction.identity and row["path"]]
    if not own:
        return BlindOutcome(prediction)
    row = own[0]
    times = [path.stat().st_mtime for path in (folder / row["path"]).iterdir() if path.is_file()]
    in_order = min(times) >= prediction.made_at.timestamp() if times else None
    loss = row["loss"] if row["status"] == "done" else None
    return BlindOutcome(prediction, loss, row["loss_se"] if loss is not None else None, in_order)


def predict_blind(study_dir: str | Path, again: bool = False) -> Blind:
    """Predict the blind run of a study and store the prediction as <study_dir>/blind.json.

    A prediction of the same run by the same rows is returned as it is; one by other rows is replaced with
    `again`, for as long as its run has not been started.
    FileNotFoundError for no study. ValueError where the key blind is missing, runs of the grids are
    unfinished or too few, the law does not identify N*, no candidate is near it, or the run was started.
    """
    folder = Path(study_dir)
    if not (folder / STUDY).is_file():
        raise FileNotFoundError(f"{folder / STUDY}: no such study. Run tools/sweep.py STUDY.yaml first.")
    with wait_for_lock(folder / LOCK):  # two predictions at once would be of two laws
        return _predict(folder, again)


def _predict(folder: Path, again: bool) -> Blind:
    study = read_study_plan(folder / STUDY, [f"directory={folder}"])
    if study.blind is None:
        raise ValueError(
            f"{folder / STUDY}: got no key 'blind', expected the sizes that the blind run may have. Add "
            "`blind: {sizes: [...]}` to STUDY.yaml and run tools/sweep.py again."
        )
    planned = expand_grids(study)
    rows = _finished_rows(folder, study, planned)
    law = runs_of_rows(rows, study.blind.objective, study.blind.flops_column, str(folder)).fit()
    _check_identified(law)
    budget = blind_budget(study, planned)
    optimum = law.optimum(budget)
    run = _nearest(study, plan_candidates(study, budget), optimum)
    if run.plan.identity in {one.plan.identity for one in planned}:
        raise ValueError(
            f"{folder}: got a blind run, {run.folder.name}, that the grids train too, expected a new one. "
            "Take it out of the grids."
        )
    prediction = _describe(study, run, law, optimum, hash_rows(rows, study.blind.flops_column), len(rows))
    return _store(folder, prediction, again)


def _store(folder: Path, prediction: Blind, again: bool) -> Blind:
    """The prediction that is in the file now: an earlier one of the same run and rows stays."""
    earlier = load_blind(folder)
    if earlier is not None:
        same = (earlier.identity, earlier.rows_sha256) == (prediction.identity, prediction.rows_sha256)
        if same:
            return earlier
        if files := find_started(folder / "runs" / earlier.run):
            raise ValueError(
                f"{folder / BLIND}: got other runs or settings than those it was made from, and its run has "
                f"been started ({files}): it stays. Choose another directory for another prediction."
            )
        if not again:
            raise ValueError(
                f"{folder / BLIND}: got other runs or settings than those it was made from. Its run has not "
                "been started: --again replaces the prediction."
            )
    if files := find_started(folder / "runs" / prediction.run):
        raise ValueError(
            f"{folder / 'runs' / prediction.run}: got a run that has been started ({files}), expected none. "
            "Delete its folder and predict before it is trained."
        )
    prediction.save(folder)
    return prediction


def find_started(run_dir: Path) -> str:
    """Names of the files by which a run shows that it was started; empty where it was not."""
    names = [name for name in (PLAN, METRICS, RESULT) if (run_dir / name).exists()]
    checkpoints = run_dir / CHECKPOINTS
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        names.append(CHECKPOINTS)
    return ", ".join(names)


def _finished_rows(folder: Path, study: StudyPlan, planned: Sequence[PlannedRun]) -> list[Row]:
    """The rows that are fitted: all runs of the grids. ValueError where one has not ended."""
    assert study.blind is not None
    wanted = [r for r in planned if r.plan.objective == study.blind.objective and not r.held_out]
    status = {row["identity"]: row for row in read_runs(folder)}
    lacking = [r for r in wanted if status.get(r.plan.identity, {}).get("status") != "done"]
    if lacking:
        notes = [_describe_unfinished(r, status.get(r.plan.identity)) for r in lacking[:MOST_NAMED]]
        raise ValueError(
            f"{folder}: got {len(lacking)} unfinished runs of the grids ({'; '.join(notes)}), expected all "
            f"{len(wanted)} done. Run tools/sweep.py again, or take out of the grids what cannot be trained."
        )
    rows = [status[r.plan.identity] | {"held_out": 0} for r in wanted]
    return select_rows(rows, study.blind.objective, study.blind.flops_column)


def _describe_unfinished(run: PlannedRun, row: Row | None) -> str:
    return f"{run.config.name}: {row['status'] if row is not None else 'missing'}"


def _check_identified(law: ComputeLaw) -> None:
    reasons = [law.not_identified[name] for name in NEEDED if name in law.not_identified]
    if reasons:
        raise ValueError(
            f"frontier: got no identified N*: {' '.join(reasons)} Add sizes on both sides of the best one at "
            "each budget to the grids, or budgets, then run tools/sweep.py and predict again."
        )


def _nearest(study: StudyPlan, candidates: dict[str, PlannedRun], optimum: Optimum) -> PlannedRun:
    """The candidate nearest to N* in log N. ValueError where it is further than FURTHEST."""

    def distance(run: PlannedRun) -> float:
        return abs(math.log(run.plan.n_params / optimum.N))

    best = min(candidates.values(), key=distance)
    if distance(best) > math.log(FURTHEST):
        sizes = ", ".join(f"{name} ({wording.count(r.plan.n_params, 3)})" for name, r in candidates.items())
        raise ValueError(
            f"study {study.name}: blind.sizes: got {sizes}, expected one within a factor of {FURTHEST:g} of "
            f"N* = {wording.count(optimum.N, 3)} at {optimum.C:.3g} FLOPs. Add a size of about that many "
            "parameters to sizes and to blind.sizes, and run tools/sweep.py again."
        )
    return best


def _describe(
    study: StudyPlan, run: PlannedRun, law: ComputeLaw, optimum: Optimum, rows_sha256: str, n_runs: int
) -> Blind:
    assert study.blind is not None
    C = float(getattr(run.plan, study.blind.flops_column))
    predicted = law.predict_run(run.plan.n_params, C)
    return Blind(
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
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        commit=git_of_code(),
        n_runs=n_runs,
        rows_sha256=rows_sha256,
    )
