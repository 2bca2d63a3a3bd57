"""Expansion of a STUDY.yaml into planned runs, with their cost, before anything is trained."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron.config.option import REQUIRED, option
from megatron.config.presets import load_model_sizes, suggest_nearest
from megatron.config.schema import DatasetConfig, RunConfig
from megatron.config.section import read_section
from megatron.config.yaml_file import is_finite, merge_sections, read_yaml
from megatron.io import write_atomic
from megatron.laws.fitting.compute_trend import PRIOR
from megatron.plan.exposure import Exposure
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import RunPlan, plan_run
from megatron.study.cell import BEST, Cell, Entry, check_name, check_removed_keys, read_entry, read_rule
from megatron.study.forecast import FORECASTS, read_forecasts
from megatron.study.format import format_short
from megatron.study.mixtures import Mixtures, select_mixtures

STUDY = "study.yaml"  # in the study's directory
CONVENTIONS = ("exact", "6nd", "kaplan", "palm", "megatron", "chinchilla")
FLOPS_COLUMN = {"exact": "train_flops", "6nd": "flops_6nd"}  # convention -> column of the study's table
REMOVED = {"grids": "cells (STUDY.md shows their keys)", "blind": "a cell {size: best, flops: ...}"}


def _read_cells(value: Any, name: str) -> list[Entry]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: got {value!r}, expected a list.")
    return [read_entry(entry, f"{name}[{i}]") for i, entry in enumerate(value)]


def _read_sizes(value: Any, name: str) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: got {value!r}, expected keys.")
    for size, shape in value.items():
        check_name(str(size), name)
        if not isinstance(shape, dict):
            raise ValueError(f"{name}.{size}: got {shape!r}, expected keys such as d_model.")
    return {str(size): shape for size, shape in value.items()}


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """Contents of a STUDY.yaml.

    run           base configuration of every run: keys of RunConfig, as written;
                  optim.lr may be a rule
    sizes         model shapes defined by this study, in addition to utils/model_sizes.yaml
    share_trunks  runs that differ only in length branch from the longest, if their
                  learning rates agree
    slope_drift   of log(L - E) by log C beyond the runs, per sqrt(log C): a larger scale widens forecasts
    """

    name: str = option(REQUIRED, "name of the study", expected="one line of text.")
    directory: Path = option(REQUIRED, "folder of all files of the study")
    run: dict[str, Any] = option(REQUIRED, "base configuration of every run")
    sizes: dict[str, dict[str, Any]] = option({}, "shapes by name", read=_read_sizes)
    mixtures: Mixtures | None = option(None, "domains, and weights of mixtures")
    cells: list[Entry] = option(REQUIRED, "combinations of settings", read=_read_cells)
    flops_convention: str = option("exact", "convention of `flops`", *CONVENTIONS)
    share_trunks: bool = option(True, "runs that differ only in length share their first steps")
    slope_drift: float = option(PRIOR.drift, "scale of the drift of the frontier's slope", above=0, unit="-")
    seed: int = option(
        0, "added to every seed", unit="-", expected="an integer, which is added to every seed."
    )

    def text(self) -> str:
        """Return the study as YAML, with its overrides applied; lists that are not set are left out."""
        whole = {key: value for key, value in asdict(self).items() if value is not None}
        whole["directory"] = str(self.directory)
        whole["cells"] = [
            {key: value for key, value in cell.items() if value not in ([], {}, "", False)}
            for cell in whole["cells"]
        ]
        return OmegaConf.to_yaml(OmegaConf.create(whole))

    def save(self) -> None:
        """Write <directory>/study.yaml."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_atomic(self.directory / STUDY, self.text())

    @property
    def best(self) -> Entry | None:
        """The entry of the run whose size the law chooses, if there is one."""
        return next((entry for entry in self.cells if entry.size == [BEST]), None)


@dataclass(frozen=True)
class Branch:
    """Starting point of a run: the folder of a longer run, and the last step that both share."""

    trunk: Path
    step: int


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    config: RunConfig
    plan: RunPlan
    folder: Path
    held_out: bool = False
    branch: Branch | None = None
    parts: frozenset[str] = frozenset()  # `part` of the entries that contain it

    @property
    def trained_steps(self) -> int:
        """Steps that the run trains itself, after its branch point."""
        return self.plan.n_steps - (self.branch.step if self.branch else 0)

    @property
    def trained_flops(self) -> float:
        """FLOPs of `trained_steps`."""
        return self.plan.train_flops * self.trained_steps / self.plan.n_steps


def read_study_plan(path: str | Path, overrides: Sequence[str] = ()) -> StudyPlan:
    """Read a STUDY.yaml with `key=value` overrides. Raises FileNotFoundError or ValueError."""
    raw = read_yaml(path, overrides)
    check_removed_keys(raw, REMOVED, str(path))
    study = read_section(StudyPlan, raw, str(path), separator=": ")
    if sum(BEST in entry.size for entry in study.cells) > 1:
        raise ValueError(f"{path}: cells: got several entries of size {BEST}, expected one at most.")
    if study.best is not None and study.mixtures is not None:
        raise ValueError(f"{path}: cells: got size {BEST} with mixtures, whose frontiers differ. Remove one.")
    return study


def expand_study(study: StudyPlan) -> list[PlannedRun]:
    """Return every run of the study, cheapest first; a run that is in two entries is returned once.

    The run of the entry `size: best` is included once its forecast is sealed:
    held out, and without a trunk. Raises ValueError naming the run for settings
    that `config/read.py` rejects, and for a forecast that was modified or whose
    runs the study no longer contains.
    """
    runs = expand_listed(study)
    sealed = {forecast.identity for forecast in read_forecasts(study.directory)}
    # planned even before a forecast: candidates that cannot be trained are
    # refused before any run starts
    best = [run for run in plan_candidates(study) if run.plan.identity in sealed]
    # the run may coincide with one of the listed runs, which is then replaced
    identities = {run.plan.identity for run in best}
    runs = [run for run in runs if run.plan.identity not in identities]
    return sorted([*runs, *best], key=lambda run: run.plan.train_flops)


def check_sealed_runs(study: StudyPlan, runs: Sequence[PlannedRun]) -> None:
    """Raise ValueError if a forecast was modified, or is of runs that the study no longer contains."""
    planned = {run.plan.identity for run in runs}
    for forecast in read_forecasts(study.directory):
        if not planned >= forecast.list_identities():
            raise ValueError(
                f"{study.directory / FORECASTS / forecast.name}.json: got a forecast of runs that the study "
                "no longer contains: a cell, its text, seed or a setting has changed. Restore it, or use "
                "another directory=..."
            )


def expand_listed(study: StudyPlan) -> list[PlannedRun]:
    """Return the runs of all entries but the one of size `best`. Raises ValueError as `expand_study`."""
    # keyed by identity: the same settings in two entries are one run
    runs: dict[str, PlannedRun] = {}
    for entry in study.cells:
        entry = replace(entry, mixture=select_mixtures(study.mixtures, entry.mixture))
        for cell in entry.list_cells() if entry.size != [BEST] else ():
            run = _plan_cell(study, entry, cell)
            earlier = runs.get(run.plan.identity)
            parts = run.parts if earlier is None else run.parts | earlier.parts
            # held out by one entry: held out in the study
            if earlier is None or run.held_out:
                earlier = run
            runs[run.plan.identity] = replace(earlier, parts=parts)
    # assign_trunks runs after the merge:
    # a run of two entries must be in one group once
    by_cost = sorted(runs.values(), key=lambda run: run.plan.train_flops)
    return assign_trunks(by_cost) if study.share_trunks else by_cost


def plan_candidates(study: StudyPlan) -> list[PlannedRun]:
    """Return the run of the entry `size: best` for each size of the study; empty without such an entry."""
    if study.best is None:
        return []
    if study.flops_convention not in FLOPS_COLUMN:
        expected = " or ".join(FLOPS_COLUMN)
        raise ValueError(f"study {study.name}: flops_convention: expected {expected} with size: {BEST}.")
    listed = {size for entry in study.cells for size in entry.size} - {BEST}
    entry = replace(study.best, size=list(study.sizes) or sorted(listed), held_out=True)
    return [_plan_cell(study, entry, cell) for cell in entry.list_cells()]


def _plan_cell(study: StudyPlan, entry: Entry, cell: Cell) -> PlannedRun:
    # seeds 0, 1, 2 with the study's seed 100 are 100, 101, 102: a replica of
    # the whole study
    cell = replace(cell, seed=cell.seed + study.seed)
    where = f"study {study.name}, run {cell.objective}-{cell.size}"
    if cell.size not in (names := [*study.sizes, *load_model_sizes()]):
        raise ValueError(f"{where}: got an unknown size '{cell.size}'; {suggest_nearest(cell.size, names)}")
    base = merge_sections(study.run, entry.run)
    for key in ("model", "objective", "misc", "optim", "lr_scheduler", "dataset"):
        if not isinstance(base.get(key) or {}, dict):
            raise ValueError(f"study {study.name}: run.{key}: got {base[key]!r}, expected keys.")
    # later sections override earlier ones: study, entry, size
    changes: dict[str, Any] = {"objective": {"name": cell.objective}, "misc": {"seed": cell.seed}}
    changes["model"] = {"size": cell.size, **study.sizes.get(cell.size, {})}
    if cell.mixture is not None and study.mixtures is not None:
        changes["dataset"] = {"path_train": str(study.mixtures.write(cell.mixture, study.directory))}
    raw = merge_sections(base, changes)
    optim, data, schedule = (dict(raw.get(key) or {}) for key in ("optim", "dataset", "lr_scheduler"))
    rate = optim.get("lr") if cell.lr is None else cell.lr
    # a number in `run` is passed on as it is; a rule is evaluated below
    rule = None if cell.lr is None and (rate is None or is_finite(rate)) else read_rule(rate, f"{where}: lr")
    if rule is not None:
        optim.pop("lr", None)
    # total_* of the base would conflict with the length of the cell
    schedule = {key: value for key, value in schedule.items() if not str(key).startswith("total_")}
    # a placeholder: RunConfig requires a length, and the length is not known
    # before the model is built
    raw |= {"optim": optim, "lr_scheduler": {**schedule, "total_iterations": 1}}
    probe = resolve_config(raw, where)  # model and dataset; the length can depend on them, so it is set below
    # D before rounding; the rule uses it unrounded,
    # so it does not depend on the batch
    all_tokens = Exposure(probe).epoch_tokens
    tokens = cell.train_tokens(probe.model, probe.dataset.seq_len, study.flops_convention, all_tokens)
    # a rule depends on N and D, which are known only after the model is built
    if rule is not None:
        optim["lr"] = rule.evaluate(probe.model, tokens)
    schedule |= _length_keys(cell, data, tokens, probe.dataset.seq_len, data.get("batch_size"))
    raw |= {"dataset": data, "optim": optim, "lr_scheduler": schedule}
    return _place_run(study, entry, raw, _name_run(cell, entry, tokens))


def _length_keys(cell: Cell, data: dict[str, Any], tokens: float, seq_len: int, batch: Any) -> dict[str, Any]:
    """Return the keys of lr_scheduler that set the length, and set dataset.unique_tokens in `data`.

    An epoch consists of whole windows of seq_len tokens. Unique
    tokens and epochs are both passed on. With a length and
    epochs, the unique windows are rounded up so that the run
    stays within that many epochs.
    """
    if cell.unique_tokens is not None:
        data["unique_tokens"] = cell.unique_tokens
    if cell.length is None:
        return {"total_epochs": cell.epochs}
    if cell.epochs is not None:
        size = batch if isinstance(batch, int) else DatasetConfig.batch_size
        # rounded to whole batches first, since a run consists of whole steps
        n_samples = max(1, round(tokens / (size * seq_len))) * size
        # Example: 2,000,000 tokens in batches of 8 x 1,024 are 244 steps,
        # 1,952 windows. With 4 epochs: ceil(1952 / 4) = 488 unique windows,
        # 499,712 tokens. Rounding down would read some windows a fifth time.
        data["unique_tokens"] = math.ceil(n_samples / cell.epochs) * seq_len
    return {"total_tokens": round(tokens)}


def _name_run(cell: Cell, entry: Entry, tokens: float) -> str:
    """Return a readable name that is unique within the entry."""
    parts = [cell.objective, cell.size, f"{format_short(tokens)}tok"]
    parts += [] if cell.mixture is None else [cell.mixture]
    if cell.unique_tokens is not None:
        parts.append(f"{format_short(cell.unique_tokens)}unique")
    if cell.epochs is not None:
        parts.append(f"{cell.epochs:g}ep")
    # a single rate does not distinguish runs
    if len(entry.lr) > 1:
        rate = next(iter(cell.lr.values())) if isinstance(cell.lr, dict) else cell.lr
        kind = f"-{next(iter(cell.lr))}" if isinstance(cell.lr, dict) else ""
        parts.append(f"lr{kind}{rate if isinstance(rate, str) else format_short(rate)}")
    name = "-".join([*parts, f"seed{cell.seed}", *([entry.label] if entry.label else [])])
    check_name(name, "run")
    return name


def _place_run(study: StudyPlan, entry: Entry, raw: dict[str, Any], name: str) -> PlannedRun:
    """Return the run in a folder named after its identity, so that changed settings never reuse a folder."""
    where = f"study {study.name}, run {name}"
    raw |= {"name": name, "logging": dict(raw.get("logging") or {})}
    # The identity is part of the folder. It includes neither name nor run_dir
    # (plan/identity.py), so that the plan matches the final configuration.
    raw["logging"]["run_dir"] = str(study.directory / "runs" / name)
    try:
        config = resolve_config(raw, where=where)
        plan = plan_run(config)
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from error
    if plan.warmup_steps > plan.n_steps:
        raise ValueError(
            f"{where}: got {plan.warmup_steps:,} warm-up steps, expected at most the run's {plan.n_steps:,}. "
            "Shorten lr_scheduler.warmup_*, or train longer."
        )
    # 8 hex digits: among 10,000 runs two agree with a probability of about 1
    # %, and they share a folder only if their names are equal too
    folder = study.directory / "runs" / f"{name}-{plan.identity[:8]}"
    config = replace(config, logging=replace(config.logging, run_dir=str(folder)))
    parts = frozenset([entry.part] if entry.part else [])
    return PlannedRun(config, plan, folder, held_out=entry.held_out, parts=parts)


def select_runs_of_part(study: StudyPlan, runs: Sequence[PlannedRun], part: str | None) -> list[PlannedRun]:
    """Return the runs of a part, and the runs whose first steps these continue; None: all runs.

    Raises ValueError for a part that the study does not have.
    """
    if part is None:
        return list(runs)
    chosen = [run for run in runs if part in run.parts]
    if not chosen:
        listed = ", ".join(sorted({entry.part for entry in study.cells if entry.part})) or "it has none"
        raise ValueError(f"--part: got {part}, expected one of the parts of study {study.name}: {listed}.")
    trunks = {run.branch.trunk for run in chosen if run.branch is not None}
    return [run for run in runs if part in run.parts or run.folder in trunks]


def assign_trunks(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs, with a branch for those that share their first steps with a longer run (the trunk).

    Two runs of one trunk identity take identical
    steps while their learning rates are equal:
    from the same warm-up through the constant phase,
    until the shorter run starts to decay.
    """
    groups: dict[tuple[str, int], list[PlannedRun]] = {}
    for run in runs:
        # only schedules with a constant phase can share steps; a cosine
        # depends on the total length from the start
        if run.config.lr_scheduler.kind in ("wsd", "constant"):
            # Equal trunk identities and equal warm-up steps give equal
            # learning rates up to the first decay. A warm-up given as a share
            # of the length differs between runs.
            groups.setdefault((run.plan.trunk_identity, run.plan.warmup_steps), []).append(run)
    changed: dict[Path, PlannedRun] = {}
    for group in groups.values():
        # the longest run contains the steps of all others
        trunk = max(group, key=lambda run: run.plan.n_steps)
        # a branch point must precede the decay of the branch and of the trunk
        # Example: trunk of 1,000 steps with 200 of decay, run of 500 with
        # 100: min(500 - 100, 800) = 400.
        last = trunk.plan.n_steps - trunk.plan.decay_steps
        # Without decay a run would end inside its trunk: it trains its last
        # step itself, to be scored. Constant schedule: the run of 500 steps
        # branches at 499.
        points = {run.folder: min(run.plan.n_steps - max(run.plan.decay_steps, 1), last) for run in group}
        del points[trunk.folder]
        # a point at 0 or below shares no step: the run decays from the start
        branches = [run for run in group if points.get(run.folder, 0) > 0]
        if not branches:
            continue
        for run in branches:
            changed[run.folder] = replace(run, branch=Branch(trunk.folder, points[run.folder]))
        # the trunk saves a checkpoint at every branch point
        checkpoint = replace(
            trunk.config.checkpoint, chkpt_at=sorted({points[run.folder] for run in branches})
        )
        # chkpt_at is not part of the identity:
        # the trunk keeps its folder and its result
        changed[trunk.folder] = replace(trunk, config=replace(trunk.config, checkpoint=checkpoint))
    return [changed.get(run.folder, run) for run in runs]
