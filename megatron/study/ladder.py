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
from megatron.config.section import check_known_keys, list_keys, read_section
from megatron.config.yaml_file import merge_sections, read_yaml
from megatron.io import write_atomic
from megatron.plan.exposure import Exposure
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import RunPlan, plan_run
from megatron.study.blind_plan import BlindPlan, read_blind_plan
from megatron.study.blind_record import BLIND, BlindPrediction, load_blind
from megatron.study.grid import Cell, Grid, check_name, read_grid
from megatron.study.rules import read_rule, round_batch

STUDY = "study.yaml"  # in the study's directory
BUDGET_TOLERANCE = 0.05  # in log FLOPs: change of a budget by rounding to whole steps


def _read_grids(value: Any, name: str) -> list[Grid]:
    if not isinstance(value, list):
        raise ValueError(f"{name}: got {value!r}, expected a list.")
    return [read_grid(grid, f"{name}[{i}]") for i, grid in enumerate(value)]


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

    run           base configuration of every run: keys of RunConfig, as written
    sizes         model shapes defined by this study, in addition to utils/model_sizes.yaml
    share_trunks  runs that differ only in length branch from the longest, if their learning rates agree
    seed          added to every seed of the grids and of the blind run
    blind         settings of the run that is predicted before it is trained
    """

    name: str = option(REQUIRED, "name of the study", expected="one line of text.")
    directory: Path = option(REQUIRED, "folder of all files of the study")
    run: dict[str, Any] = option(REQUIRED, "base configuration of every run")
    sizes: dict[str, dict[str, Any]] = option({}, "shapes by name", read=_read_sizes)
    grids: list[Grid] = option(REQUIRED, "combinations of settings", read=_read_grids)
    share_trunks: bool = option(True, "runs that differ only in length share their first steps")
    seed: int = option(
        0, "added to every seed", unit="-", expected="an integer, which is added to every seed."
    )
    blind: BlindPlan | None = option(None, "run that is predicted before it is trained", read=read_blind_plan)

    def save(self) -> None:
        """Write <directory>/study.yaml: the study with its overrides applied."""
        self.directory.mkdir(parents=True, exist_ok=True)
        whole = asdict(self) | {"directory": str(self.directory)}
        write_atomic(self.directory / STUDY, OmegaConf.to_yaml(OmegaConf.create(whole)))


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
    parts: frozenset[str] = frozenset()  # `part` of the grids that contain it

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
    keys = list_keys(StudyPlan)
    check_known_keys(raw, keys, str(path))
    for key in ("name", "directory", "run", "grids"):
        if not raw.get(key):
            raise ValueError(f"{path}: got no '{key}', expected the keys {', '.join(keys)}.")
    return read_section(StudyPlan, raw, str(path), separator=": ")


def expand_study(study: StudyPlan) -> list[PlannedRun]:
    """Return every run of the study, cheapest first; a run that is in two grids is returned once.

    The run predicted in blind.json, if any, is included: held out, and without a trunk.
    Raises ValueError naming the run for settings that `config/read.py` rejects, and for a blind.json that was
    modified or belongs to another study.
    """
    runs = expand_grids(study)
    prediction = load_blind(study.directory)
    # a study without a prediction yet: its candidates are planned only to validate them
    if prediction is None:
        if study.blind is not None:  # reject untrainable candidates before any run starts
            plan_candidates(study, blind_budget(study, runs))
        return runs
    blind = _plan_blind_run(study, prediction)
    # the blind run may coincide with a run of the grids, which is then replaced
    runs = [run for run in runs if run.plan.identity != blind.plan.identity]
    return sorted([*runs, blind], key=lambda run: run.plan.train_flops)


def expand_grids(study: StudyPlan) -> list[PlannedRun]:
    """Return the runs of the grids, without the blind run. Raises ValueError as `expand_study`."""
    # keyed by identity: the same settings in two grids are one run
    runs: dict[str, PlannedRun] = {}
    for grid in study.grids:
        for cell in grid.cells():
            run = _plan_cell(study, grid, cell)
            earlier = runs.get(run.plan.identity)
            parts = run.parts if earlier is None else run.parts | earlier.parts
            # held out by one grid: held out in the study
            if earlier is None or run.held_out:
                earlier = run
            runs[run.plan.identity] = replace(earlier, parts=parts)
    # assign_trunks runs after the merge: a run of two grids must be in one group once
    by_cost = sorted(runs.values(), key=lambda run: run.plan.train_flops)
    return assign_trunks(by_cost) if study.share_trunks else by_cost


def blind_budget(study: StudyPlan, runs: Sequence[PlannedRun]) -> float:
    """Return the FLOPs of the blind run: `compute` times the largest budget of the grids' `runs`."""
    assert study.blind is not None
    objective, convention = study.blind.objective, study.blind.flops_convention
    key = study.blind.flops_column
    planned = [getattr(r.plan, key) for r in runs if r.plan.objective == objective and not r.held_out]
    if not planned:
        raise ValueError(
            f"study {study.name}: blind.objective: got {objective}, expected an objective that a grid "
            "trains and does not hold out."
        )
    # runs have whole steps, so their FLOPs differ slightly from the budget as written: use the written one
    written = [
        flops
        for grid in study.grids
        if grid.flops_convention == convention and objective in grid.objectives and not grid.held_out
        for flops in grid.train_flops
        # The largest run can be of a grid with train_tokens, which writes no budget. The smaller budgets that
        # other grids write do not count then.
        if abs(math.log(flops / max(planned))) < BUDGET_TOLERANCE
    ]
    return study.blind.compute * (max(written) if written else max(planned))


def plan_candidates(study: StudyPlan, budget: float) -> dict[str, PlannedRun]:
    """Return the blind run of `budget` FLOPs for each candidate size."""
    assert study.blind is not None
    grids = {size: study.blind.make_grid(size, budget) for size in study.blind.sizes}
    return {size: _plan_cell(study, grid, next(grid.cells())) for size, grid in grids.items()}


def _plan_blind_run(study: StudyPlan, prediction: BlindPrediction) -> PlannedRun:
    """Return the predicted run. Raises ValueError if this study does not contain it."""
    where = f"{study.directory / BLIND}"
    if study.blind is None or prediction.size not in study.blind.sizes:
        raise ValueError(
            f"{where}: got a prediction of size {prediction.size}, expected one of the sizes under 'blind' "
            f"of study {study.name}. Restore that key, or use another directory with directory=..."
        )
    # only the predicted size: the other candidates need not be trainable any more
    alone = replace(study.blind, sizes=[prediction.size])
    planned = plan_candidates(replace(study, blind=alone), prediction.budget)[prediction.size]
    if planned.plan.identity != prediction.identity:
        raise ValueError(
            f"{where}: got a prediction of run {prediction.identity[:8]}, expected "
            f"{planned.plan.identity[:8]}: the study's seed, text or a setting of the run has changed. "
            "Restore it, or use another directory with directory=..."
        )
    return planned


def _plan_cell(study: StudyPlan, grid: Grid, cell: Cell) -> PlannedRun:
    # grid seeds 0, 1, 2 with the study's seed 100 are 100, 101, 102: a replica of the whole study
    cell = replace(cell, seed=cell.seed + study.seed)
    base = merge_sections(study.run, grid.run)
    where = f"study {study.name}, run {cell.objective}-{cell.size}"
    if cell.size not in (names := [*study.sizes, *load_model_sizes()]):
        raise ValueError(f"{where}: got an unknown size '{cell.size}'; {suggest_nearest(cell.size, names)}")

    def read_section(key: str) -> dict[str, Any]:
        value = base.get(key) or {}
        if not isinstance(value, dict):
            raise ValueError(f"study {study.name}: run.{key}: got {value!r}, expected keys.")
        return dict(value)

    rate = None if cell.lr is None else read_rule(cell.lr, "lr", f"{where}: lr")
    # total_* of the base would conflict with the length of the cell
    schedule = {
        key: value for key, value in read_section("lr_scheduler").items() if not str(key).startswith("total_")
    }
    # later sections override earlier ones: study, grid, size, rule
    raw: dict[str, Any] = {
        **base,
        "model": {
            **read_section("model"),
            "size": cell.size,
            **study.sizes.get(cell.size, {}),
            **(rate.model if rate else {}),
        },
        "objective": {**read_section("objective"), "name": cell.objective},
        "misc": {**read_section("misc"), "seed": cell.seed},
        # a placeholder: RunConfig requires a length, and the length is not known before the model is built
        "lr_scheduler": {**schedule, "total_iterations": 1},
    }
    probe = resolve_config(raw, where)  # model and dataset; the length can depend on them, so it is set below
    data, optim = read_section("dataset"), read_section("optim")
    corpus_tokens = Exposure(probe).epoch_tokens
    # D before rounding; the rules below use it unrounded, so they do not depend on the batch
    tokens = cell.train_tokens(probe.model, probe.dataset.seq_len, grid.flops_convention, corpus_tokens)
    # rules depend on N and D, which are known only after the model is built
    if rate is not None:
        optim["lr"] = rate(probe.model, tokens)
    if cell.batch_tokens is not None:
        batch = read_rule(cell.batch_tokens, "batch_tokens", f"{where}: batch_tokens")(probe.model, tokens)
        # a batch consists of whole microbatches
        multiple = probe.dataset.microbatch_size or 1
        data["batch_size"] = round_batch(batch, probe.dataset.seq_len, multiple)
    schedule |= _length_keys(cell, data, tokens, probe.dataset.seq_len, data.get("batch_size"))
    raw |= {"dataset": data, "optim": optim, "lr_scheduler": schedule}
    return _place_run(study, grid, raw, _name_run(cell, grid, tokens))


def _length_keys(cell: Cell, data: dict[str, Any], tokens: float, seq_len: int, batch: Any) -> dict[str, Any]:
    """Return the keys of lr_scheduler that set the length, and set dataset.unique_tokens in `data`.

    An epoch consists of whole windows of seq_len tokens. Unique tokens and epochs are both passed on. With a
    length and epochs, the unique windows are rounded up so that the run stays within that many epochs.
    """
    if cell.unique_tokens is not None:
        data["unique_tokens"] = cell.unique_tokens
    if cell.length is None:
        return {"total_epochs": cell.epochs}
    if cell.epochs is not None:
        size = batch if isinstance(batch, int) else DatasetConfig.batch_size
        # rounded to whole batches first, since a run consists of whole steps
        n_samples = max(1, round(tokens / (size * seq_len))) * size
        # Example: 2,000,000 tokens in batches of 8 x 1,024 are 244 steps, 1,952 windows. With 4 epochs:
        # ceil(1952 / 4) = 488 unique windows, 499,712 tokens. Rounding down would read some windows a fifth
        # time.
        data["unique_tokens"] = math.ceil(n_samples / cell.epochs) * seq_len
    return {"total_tokens": round(tokens)}


def _name_run(cell: Cell, grid: Grid, tokens: float) -> str:
    """Return a readable name that is unique within the grid."""
    parts = [cell.objective, cell.size, f"{format_short(tokens)}tok"]
    if cell.unique_tokens is not None:
        parts.append(f"{format_short(cell.unique_tokens)}unique")
    if cell.epochs is not None:
        parts.append(f"{cell.epochs:g}ep")
    for key, rule in (("lr", cell.lr), ("batch_tokens", cell.batch_tokens)):
        # an axis with a single rule does not distinguish runs
        if len(getattr(grid, key)) > 1:
            # the first value of a rule such as {mup: 3.0e-3, base_d_model: 256}: "lr-mup0.003"
            value = next(iter(rule.values())) if isinstance(rule, dict) else rule
            kind = f"-{next(iter(rule))}" if isinstance(rule, dict) else ""
            shown = value if isinstance(value, str) else format_short(value)
            parts.append(f"{key.partition('_')[0]}{kind}{shown}")
    name = "-".join([*parts, f"seed{cell.seed}", *([grid.label] if grid.label else [])])
    check_name(name, "run")
    return name


def _place_run(study: StudyPlan, grid: Grid, raw: dict[str, Any], name: str) -> PlannedRun:
    """Return the run in a folder named after its identity, so that changed settings never reuse a folder."""
    raw |= {"name": name, "logging": dict(raw.get("logging") or {})}
    # a first plan gives the identity, which is part of the folder and therefore of the final configuration
    # The identity includes neither name nor run_dir (plan/identity.py), so the plan of this configuration
    # is also that of the final one.
    raw["logging"]["run_dir"] = str(study.directory / "runs" / name)
    where = f"study {study.name}, run {name}"
    try:
        plan = plan_run(resolve_config(raw, where=where))
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from error
    if plan.warmup_steps > plan.n_steps:
        raise ValueError(
            f"{where}: got {plan.warmup_steps:,} warm-up steps, expected at most the run's {plan.n_steps:,}. "
            "Shorten lr_scheduler.warmup_*, or train longer."
        )
    # 8 hex digits: among 10,000 runs two agree with a probability of about 1 %, and they share a folder only
    # if their names are equal too
    folder = study.directory / "runs" / f"{name}-{plan.identity[:8]}"
    raw["logging"]["run_dir"] = str(folder)
    parts = frozenset([grid.part] if grid.part else [])
    return PlannedRun(resolve_config(raw, where=name), plan, folder, held_out=grid.held_out, parts=parts)


def select_runs_of_part(study: StudyPlan, runs: Sequence[PlannedRun], part: str | None) -> list[PlannedRun]:
    """Return the runs of a part, and the runs whose first steps these continue; None: all runs.

    Raises ValueError for a part that the study does not have.
    """
    if part is None:
        return list(runs)
    names = sorted({grid.part for grid in study.grids if grid.part})
    if part not in names:
        listed = ", ".join(names) or "it has none"
        raise ValueError(f"--part: got {part}, expected one of the parts of study {study.name}: {listed}.")
    chosen = [run for run in runs if part in run.parts]
    trunks = {run.branch.trunk for run in chosen if run.branch is not None}
    return [run for run in runs if part in run.parts or run.folder in trunks]


def assign_trunks(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs, with a branch for those that share their first steps with a longer run (the trunk).

    Two runs of one trunk identity take identical steps while their learning rates are equal: from the same
    warm-up through the constant phase, until the shorter run starts to decay.
    """
    groups: dict[tuple[str, int], list[PlannedRun]] = {}
    for run in runs:
        # only schedules with a constant phase can share steps; a cosine depends on the total length from
        # the start
        if run.config.lr_scheduler.kind in ("wsd", "constant"):
            # Equal trunk identities and equal warm-up steps give equal learning rates up to the first decay.
            # A warm-up given as a share of the length differs between runs.
            groups.setdefault((run.plan.trunk_identity, run.plan.warmup_steps), []).append(run)
    changed: dict[Path, PlannedRun] = {}
    for group in groups.values():
        # the longest run contains the steps of all others
        trunk = max(group, key=lambda run: run.plan.n_steps)
        # a branch point must precede the decay of the branch and of the trunk
        # Example: trunk of 1,000 steps with 200 of decay, run of 500 with 100: min(500 - 100, 800) = 400.
        last = trunk.plan.n_steps - trunk.plan.decay_steps
        points = {run.folder: min(run.plan.n_steps - run.plan.decay_steps, last) for run in group}
        # without decay a run would end inside its trunk: it trains its last step itself, to be scored
        # `points` and `group` have the same order. Constant schedule: the run of 500 steps branches at 499.
        points = {f: min(p, r.plan.n_steps - 1) for (f, p), r in zip(points.items(), group, strict=True)}
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
        # chkpt_at is not part of the identity: the trunk keeps its folder and its result
        changed[trunk.folder] = replace(trunk, config=replace(trunk.config, checkpoint=checkpoint))
    return [changed.get(run.folder, run) for run in runs]


def format_short(n: float) -> str:
    """Format 250000 as 250k and 1500000 as 1.5M: at most three digits and a suffix, for names and tables."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,600 is 1M, not 1e+03k: from 0.9995 on, three digits round up to the next suffix
        if n >= size * 0.9995:
            return f"{n / size:.3g}{letter}"
    return f"{n:.3g}"
