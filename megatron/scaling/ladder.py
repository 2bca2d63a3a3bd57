"""The ladder of a study: which runs there are, and what they cost, before anything is spent."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron.config.exposure import Exposure
from megatron.config.plan import RunPlan, plan_run
from megatron.config.presets import model_sizes, nearest
from megatron.config.read import build_config, refuse_unknown
from megatron.config.schema import DatasetConfig, RunConfig
from megatron.config.yaml_file import is_finite, is_one_line, merge, read_yaml
from megatron.run_dir import write_whole
from megatron.scaling.blind_plan import BlindPlan, read_blind_plan
from megatron.scaling.blind_record import BLIND, Blind, load_blind
from megatron.scaling.grid import Cell, Grid, check_name, read_grid
from megatron.scaling.rules import read_rule, whole_batch

STUDY = "study.yaml"  # in the study's directory
SAME_BUDGET = 0.05  # of log FLOPs: by how much whole steps may change a budget


@dataclass(frozen=True)
class StudyPlan:
    """A STUDY.yaml, read.

    run           what every run starts from: keys of RunConfig, as written
    sizes         shapes that this study names itself, beside those of utils/model_sizes.yaml
    share_trunks  runs that differ in length alone branch from the longest where their rates allow it
    seed          added to every seed of the grids and of the blind run
    blind         the run that is predicted before it is trained
    """

    name: str
    directory: Path
    run: dict[str, Any]
    sizes: dict[str, dict[str, Any]]
    grids: list[Grid]
    share_trunks: bool = True
    seed: int = 0
    blind: BlindPlan | None = None

    def save(self) -> None:
        """Write <directory>/study.yaml: the study as it is run, overrides and all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        whole = asdict(self) | {"directory": str(self.directory)}
        write_whole(self.directory / STUDY, OmegaConf.to_yaml(OmegaConf.create(whole)))


@dataclass(frozen=True)
class Branch:
    """Where a run may start from: the folder of a longer one, and the last step that both share."""

    trunk: Path
    step: int


@dataclass(frozen=True)
class PlannedRun:
    """One run of the ladder."""

    config: RunConfig
    plan: RunPlan
    folder: Path
    held_out: bool = False
    branch: Branch | None = None

    @property
    def own_steps(self) -> int:
        """Steps that it takes itself."""
        return self.plan.n_steps - (self.branch.step if self.branch else 0)

    @property
    def own_flops(self) -> float:
        """FLOPs that it spends itself."""
        return self.plan.train_flops * self.own_steps / self.plan.n_steps


def read_study_plan(path: str | Path, overrides: Sequence[str] = ()) -> StudyPlan:
    """Read a STUDY.yaml, with `key=value` words over it. FileNotFoundError, or ValueError in one sentence."""
    raw = read_yaml(path, overrides)
    known = [f.name for f in fields(StudyPlan)]
    refuse_unknown(raw, known, str(path))
    for key in ("name", "directory", "run", "grids"):
        if not raw.get(key):
            raise ValueError(f"{path}: no '{key}'; wanted the keys {', '.join(known)}")
    for key in ("name", "directory"):
        words = str(raw[key]) if key == "name" and is_finite(raw[key]) else raw[key]
        if not isinstance(words, str) or not is_one_line(words):
            raise ValueError(f"{path}: {key}: got {raw[key]!r}, expected one line of text. Write a word.")
    for key, kind in (("run", dict), ("sizes", dict), ("grids", list)):
        if raw.get(key) and not isinstance(raw[key], kind):
            raise ValueError(
                f"{path}: {key}: found {raw[key]!r}, wanted {'a list' if kind is list else 'keys'}"
            )
    sizes = {}
    for name, shape in (raw.get("sizes") or {}).items():
        check_name(str(name), f"{path}: sizes")
        if not isinstance(shape, dict):
            raise ValueError(f"{path}: sizes.{name}: found {shape!r}, wanted keys such as d_model")
        sizes[str(name)] = shape
    share_trunks = raw.get("share_trunks", True)
    if not isinstance(share_trunks, bool):
        raise ValueError(f"{path}: share_trunks: found {share_trunks!r}, wanted true or false")
    seed = 0 if raw.get("seed") is None else raw["seed"]
    if type(seed) is not int:
        raise ValueError(
            f"{path}: seed: got {seed!r}, expected a whole number, which is added to every seed."
        )
    grids = [read_grid(one, f"{path}: grids[{i}]") for i, one in enumerate(raw["grids"])]
    blind = None if raw.get("blind") is None else read_blind_plan(raw["blind"], f"{path}: blind")
    name, directory = str(raw["name"]), Path(raw["directory"])
    return StudyPlan(name, directory, raw["run"], sizes, grids, share_trunks, seed, blind)


def expand(study: StudyPlan) -> list[PlannedRun]:
    """Every run of the study, smallest cost first; a run that two grids name is there once.

    Where blind.json has a prediction, its run is one of them, held out and with no part in a trunk.
    Raises ValueError for what `config/read.py` refuses, naming the run, and for a blind.json that was changed
    or is of another study.
    """
    runs = expand_grids(study)
    prediction = load_blind(study.directory)
    if prediction is None:
        if study.blind is not None:  # a candidate that cannot be trained is refused before any run is
            plan_candidates(study, blind_budget(study, runs))
        return runs
    blind = _planned_blind(study, prediction)
    runs = [run for run in runs if run.plan.identity != blind.plan.identity]
    return sorted([*runs, blind], key=lambda run: run.plan.train_flops)


def expand_grids(study: StudyPlan) -> list[PlannedRun]:
    """The runs of the grids alone. ValueError as `expand`."""
    runs: dict[str, PlannedRun] = {}
    for grid in study.grids:
        for cell in grid.cells():
            run = _planned(study, grid, cell)
            # a run that is held out anywhere is held out
            if run.held_out or run.plan.identity not in runs:
                runs[run.plan.identity] = run
    by_cost = sorted(runs.values(), key=lambda run: run.plan.train_flops)
    return with_trunks(by_cost) if study.share_trunks else by_cost


def blind_budget(study: StudyPlan, runs: Sequence[PlannedRun]) -> float:
    """FLOPs of the blind run: `compute` times the largest budget of the `runs` of the grids."""
    assert study.blind is not None
    objective, convention = study.blind.objective, study.blind.flops_convention
    key = study.blind.flops_column
    planned = [getattr(r.plan, key) for r in runs if r.plan.objective == objective and not r.held_out]
    if not planned:
        raise ValueError(
            f"study {study.name}: blind.objective: got {objective}, expected one that a grid trains and that "
            "is not held out."
        )
    # the runs of one budget are whole steps: its FLOPs as written are a rounder number
    written = [
        flops
        for grid in study.grids
        if grid.flops_convention == convention and objective in grid.objectives and not grid.held_out
        for flops in grid.train_flops
        if abs(math.log(flops / max(planned))) < SAME_BUDGET
    ]
    return study.blind.compute * (max(written) if written else max(planned))


def plan_candidates(study: StudyPlan, budget: float) -> dict[str, PlannedRun]:
    """The blind run of `budget` FLOPs by each size that it may have."""
    assert study.blind is not None
    grids = {size: study.blind.grid(size, budget) for size in study.blind.sizes}
    return {size: _planned(study, grid, next(grid.cells())) for size, grid in grids.items()}


def _planned_blind(study: StudyPlan, prediction: Blind) -> PlannedRun:
    """The run that was predicted. ValueError where this study has it not."""
    where = f"{study.directory / BLIND}"
    if study.blind is None or prediction.size not in study.blind.sizes:
        raise ValueError(
            f"{where}: got a prediction of size {prediction.size}, expected a size under 'blind' of study "
            f"{study.name}. Restore that key, or choose another directory with directory=..."
        )
    alone = replace(study.blind, sizes=[prediction.size])
    planned = plan_candidates(replace(study, blind=alone), prediction.budget)[prediction.size]
    if planned.plan.identity != prediction.identity:
        raise ValueError(
            f"{where}: got a prediction of run {prediction.identity[:8]}, expected "
            f"{planned.plan.identity[:8]}: the study's seed, text or a setting of the run was changed. "
            "Restore them, or choose another directory with directory=..."
        )
    return planned


def _planned(study: StudyPlan, grid: Grid, cell: Cell) -> PlannedRun:
    cell = replace(cell, seed=cell.seed + study.seed)
    base = merge(study.run, grid.run)
    where = f"study {study.name}, run {cell.objective}-{cell.size}"
    if cell.size not in (known := [*study.sizes, *model_sizes()]):
        raise ValueError(f"{where}: there is no size '{cell.size}'; {nearest(cell.size, known)}")

    def section(key: str) -> dict[str, Any]:
        held = base.get(key) or {}
        if not isinstance(held, dict):
            raise ValueError(f"study {study.name}: run.{key}: wanted keys, found {held!r}")
        return dict(held)

    rate = None if cell.lr is None else read_rule(cell.lr, "lr", f"{where}: lr")
    schedule = {
        key: value for key, value in section("lr_scheduler").items() if not str(key).startswith("total_")
    }
    raw: dict[str, Any] = {
        **base,
        "model": {
            **section("model"),
            "size": cell.size,
            **study.sizes.get(cell.size, {}),
            **(rate.model if rate else {}),
        },
        "objective": {**section("objective"), "name": cell.objective},
        "misc": {**section("misc"), "seed": cell.seed},
        "lr_scheduler": {**schedule, "total_iterations": 1},
    }
    probe = build_config(raw, where)  # the shape, before the length that may follow from it
    data, optim = section("dataset"), section("optim")
    held = Exposure(probe).tokens
    tokens = cell.train_tokens(probe.model, probe.dataset.seq_len, grid.flops_convention, held)
    if rate is not None:
        optim["lr"] = rate(probe.model, tokens)
    if cell.batch_tokens is not None:
        batch = read_rule(cell.batch_tokens, "batch_tokens", f"{where}: batch_tokens")(probe.model, tokens)
        multiple = probe.dataset.microbatch_size or 1
        data["batch_size"] = whole_batch(batch, probe.dataset.seq_len, multiple)
    schedule |= _length(cell, data, tokens, probe.dataset.seq_len, data.get("batch_size"))
    raw |= {"dataset": data, "optim": optim, "lr_scheduler": schedule}
    return _placed(study, grid, raw, _name(cell, grid, tokens))


def _length(cell: Cell, data: dict[str, Any], tokens: float, seq_len: int, batch: Any) -> dict[str, Any]:
    """The keys of lr_scheduler that say how long; sets dataset.unique_tokens where it follows.

    An epoch is whole windows: epochs of unique tokens are asked for as such, and a length in a number of
    epochs has as many unique windows as keep it within them.
    """
    if cell.unique_tokens is not None:
        data["unique_tokens"] = cell.unique_tokens
    if cell.length is None:
        return {"total_epochs": cell.epochs}
    if cell.epochs is not None:
        size = batch if isinstance(batch, int) else DatasetConfig.batch_size
        n_samples = max(1, round(tokens / (size * seq_len))) * size
        data["unique_tokens"] = math.ceil(n_samples / cell.epochs) * seq_len
    return {"total_tokens": round(tokens)}


def _name(cell: Cell, grid: Grid, tokens: float) -> str:
    """What tells the runs of a grid apart, for people."""
    parts = [cell.objective, cell.size, f"{short_number(tokens)}tok"]
    if cell.unique_tokens is not None:
        parts.append(f"{short_number(cell.unique_tokens)}unique")
    if cell.epochs is not None:
        parts.append(f"{cell.epochs:g}ep")
    for key, told in (("lr", cell.lr), ("batch_tokens", cell.batch_tokens)):
        if len(getattr(grid, key)) > 1:
            value = next(iter(told.values())) if isinstance(told, dict) else told
            kind = f"-{next(iter(told))}" if isinstance(told, dict) else ""
            shown = value if isinstance(value, str) else short_number(value)
            parts.append(f"{key.partition('_')[0]}{kind}{shown}")
    name = "-".join([*parts, f"seed{cell.seed}", *([grid.label] if grid.label else [])])
    check_name(name, "run")
    return name


def _placed(study: StudyPlan, grid: Grid, raw: dict[str, Any], name: str) -> PlannedRun:
    """The run in its folder, which carries the identity: no study mixes with what an earlier one left."""
    raw |= {"name": name, "logging": dict(raw.get("logging") or {})}
    raw["logging"]["run_dir"] = str(study.directory / "runs" / name)
    where = f"study {study.name}, run {name}"
    try:
        plan = plan_run(build_config(raw, where=where))
    except ValueError as error:
        raise ValueError(str(error) if where in str(error) else f"{where}: {error}") from error
    if plan.warmup_steps > plan.n_steps:
        raise ValueError(
            f"{where}: {plan.warmup_steps:,} warm-up steps are more than the run's {plan.n_steps:,}; "
            "shorten lr_scheduler.warmup_*, or train longer"
        )
    folder = study.directory / "runs" / f"{name}-{plan.identity[:8]}"
    raw["logging"]["run_dir"] = str(folder)
    return PlannedRun(build_config(raw, where=name), plan, folder, held_out=grid.held_out)


def with_trunks(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs, those that share their first steps with a longer one branching from it.

    Two runs of one trunk identity take the same steps for as long as their rates are the same: at a steady
    rate after the same warm-up, until the shorter decays (config/identity.py, train/branch.py).
    """
    groups: dict[tuple[str, int], list[PlannedRun]] = {}
    for run in runs:
        if run.config.lr_scheduler.kind in ("wsd", "constant"):
            groups.setdefault((run.plan.trunk_identity, run.plan.warmup_steps), []).append(run)
    changed: dict[Path, PlannedRun] = {}
    for group in groups.values():
        trunk = max(group, key=lambda run: run.plan.n_steps)
        last = trunk.plan.n_steps - trunk.plan.decay_steps
        points = {run.folder: min(run.plan.n_steps - run.plan.decay_steps, last) for run in group}
        # a run at a constant rate ends inside the trunk: its last step is its own, which scores it
        points = {f: min(p, r.plan.n_steps - 1) for (f, p), r in zip(points.items(), group, strict=True)}
        del points[trunk.folder]
        branches = [run for run in group if points.get(run.folder, 0) > 0]
        if not branches:
            continue
        for run in branches:
            changed[run.folder] = replace(run, branch=Branch(trunk.folder, points[run.folder]))
        told = replace(trunk.config.checkpoint, chkpt_at=sorted({points[run.folder] for run in branches}))
        changed[trunk.folder] = replace(trunk, config=replace(trunk.config, checkpoint=told))
    return [changed.get(run.folder, run) for run in runs]


def short_number(n: float) -> str:
    """250000 -> 250k, 1500000 -> 1.5M: three digits and a letter, for names and tables."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size * 0.9995:
            return f"{n / size:.3g}{letter}"
    return f"{n:.3g}"
