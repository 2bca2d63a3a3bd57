"""Going on from a checkpoint."""

import json
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import store
from megatron.checkpoint.layout import find
from megatron.config.datapaths import SYNTHETIC
from megatron.config.plan import RunPlan
from megatron.config.read import as_dict
from megatron.log import get_logger
from megatron.mixture.source import MixtureSamples
from megatron.parallel.reduce import first_says
from megatron.train.branch import check_branch
from megatron.train.build import Run
from megatron.train.state import TrainState

log = get_logger(__name__)


def resume(run: Run) -> TrainState:
    """Load what checkpoint.resume names into the engine; a fresh state where there is nothing to load.

    Rank 0 chooses for all. Raises ValueError for a checkpoint of another model or another run: it is
    compared, never merged.
    """
    told: dict[str, str] = {}
    if run.world.is_first:
        try:
            path = _chosen(run)
            told = {} if path is None else {"path": str(path)}
        except (OSError, ValueError) as error:
            told = {"error": str(error)}
    told = json.loads(first_says(json.dumps(told), run.world))
    if "error" in told:
        raise ValueError(told["error"])
    return _load(run, Path(told["path"])) if told else TrainState()


def _chosen(run: Run) -> Path | None:
    """The checkpoint to go on from, whole and of this run or its trunk."""
    wanted, trunk = run.config.checkpoint.resume, run.config.checkpoint.branch_from
    found = None
    if wanted == "auto":
        found = store.newest_whole(run.checkpoints, run.config.checkpoint.prefix)
        if found is None:
            _refuse_damaged(run)
    elif wanted != "never":
        found = Path(wanted), store.verify(Path(wanted))
    if found is not None:
        _compare(*found, run)
        return found[0]
    if trunk is None:
        return None
    path = Path(trunk)
    meta = store.verify(path)
    check_branch(path, store.read_parts(path, meta, store.IN_BOTH), meta, run)
    return path


def _refuse_damaged(run: Run) -> None:
    """ValueError where there are checkpoints, none of them whole: to start at step 0 would lose the run."""
    damaged = find(run.checkpoints, run.config.checkpoint.prefix)
    if damaged:
        names = ", ".join(found.path.name for found in damaged[-3:])
        raise ValueError(
            f"{run.checkpoints}: all {len(damaged)} checkpoints are damaged ({names}), expected a whole one. "
            "Restore one from a copy or give another with checkpoint.resume=PATH; to train again from the "
            "first step, which drops the metrics of this run, delete them or set checkpoint.resume=never"
        )


def _load(run: Run, path: Path) -> TrainState:
    """Load a checkpoint of which rank 0 has said that it is whole; each rank reads what it needs."""
    meta = store.read_meta(path)
    small = store.read_parts(path, meta, store.IN_BOTH)
    if store.is_sharded(meta):
        from megatron.checkpoint import sharded  # imports for a second; full checkpoints do without

        held = run.engine.sharded_state()
        sharded.read(path, held)
        held["optim"] |= small["iter"].get("engine", {})
        run.engine.load_sharded_state(held)
    else:
        whole = store.read_parts(path, meta, ("model", "optim")) if run.world.is_first else {}
        run.engine.load_state_dict(whole)
    torch.set_rng_state(small["iter"]["rng"]["cpu"])
    state = TrainState.from_dict(small["iter"])
    if isinstance(run.train_samples, MixtureSamples):
        run.train_samples.restore(small["iter"]["mixture"])
    log.info("going on after step %d from %s", state.step, path)
    return state


def describe(run: Run, state: TrainState) -> str:
    """One line on what is about to run."""
    plan = run.plan
    return (
        f"{plan.name}: {plan.objective}, size {plan.size}, "
        f"N {plan.n_params:,} ({plan.n_non_embedding:,} without embedding), "
        f"{plan.train_tokens:,} tokens ({plan.epochs:.2f} epochs), steps {state.step} to {plan.n_steps:,}, "
        f"{plan.train_flops:.3g} FLOPs, {run.world.n_ranks} rank(s) on {run.world.device.type}"
    )


def describe_data(plan: RunPlan) -> list[str]:
    """A line for each corpus: how often the run will read it."""
    if [corpus.prefix for corpus in plan.corpora] == [SYNTHETIC] and not plan.repeated_tokens:
        return ["  synthetic: random tokens, none read twice"]
    return [
        f"  {corpus.name}: {corpus.share:.2%} of the samples, {corpus.epochs:.2f} epochs of "
        f"{corpus.tokens:,} tokens; {corpus.unique_tokens:,} unique, {corpus.repeated_tokens:,} repeated"
        for corpus in plan.corpora
    ]


def _compare(path: Path, meta: dict[str, Any], run: Run) -> None:
    if meta["identity"] == run.plan.identity:
        return
    mine, theirs = as_dict(run.config), meta["config"]
    sections = ("model", "dataset", "objective", "optim", "lr_scheduler", "misc", "dist")
    differ = [
        f"{section}.{key} was {theirs.get(section, {}).get(key)!r}, is {value!r}"
        for section in sections
        for key, value in mine[section].items()
        if theirs.get(section, {}).get(key) != value
    ]
    shared = run.config.checkpoint.directory is not None
    choice = "checkpoint.prefix or checkpoint.directory" if shared else "logging.run_dir"
    raise ValueError(
        f"{path}: checkpoint of another run ({'; '.join(differ[:4]) or 'its corpus has changed'}); "
        f"choose another {choice}, or checkpoint.resume=never to start anew"
    )
