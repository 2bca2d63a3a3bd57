"""Resuming from a checkpoint of this run, or branching from a step of another.

One trunk with a constant learning rate serves runs of several lengths.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import store
from megatron.checkpoint.layout import find_checkpoints
from megatron.config.read import config_to_dict
from megatron.log import get_logger
from megatron.optim.schedule import LearningRateSchedule
from megatron.parallel.collectives import broadcast_string
from megatron.plan.datapaths import SYNTHETIC
from megatron.plan.run_plan import RunPlan
from megatron.train.build import Run, build_schedule, count_full_batches
from megatron.train.state import TrainState

log = get_logger(__name__)


def resume_run(run: Run) -> TrainState:
    """Load the checkpoint of checkpoint.resume into the engine, or return a new state without one.

    Rank 0 chooses the checkpoint for all ranks.
    Raises ValueError for a checkpoint of another model or run.
    """
    # the choice or its error is broadcast: an exception
    # on rank 0 alone would leave the others waiting
    message: dict[str, str] = {}
    if run.world.is_first:
        try:
            path = _choose_checkpoint(run)
            message = {} if path is None else {"path": str(path)}
        except (OSError, ValueError) as error:
            message = {"error": str(error)}
    message = json.loads(broadcast_string(json.dumps(message), run.world))
    if "error" in message:
        raise ValueError(message["error"])
    return _load_checkpoint(run, Path(message["path"])) if message else TrainState()


def _choose_checkpoint(run: Run) -> Path | None:
    """Return the checkpoint to resume from: verified, and of this run or its trunk.

    None to start at step 0.
    """
    requested, trunk = run.config.checkpoint.resume, run.config.checkpoint.branch_from
    checkpoint = None
    if requested == "auto":
        checkpoint = store.find_newest_valid(run.checkpoints, run.config.checkpoint.prefix)
        if checkpoint is None:
            _refuse_damaged(run)
    elif requested != "never":
        checkpoint = Path(requested), store.verify_checkpoint(Path(requested))
    if checkpoint is not None:
        _check_identity(*checkpoint, run)
        return checkpoint[0]
    if trunk is None:
        return None
    path = Path(trunk)
    meta = store.verify_checkpoint(path)
    _check_branch(path, store.read_parts(path, meta, store.SHARED_PARTS), meta, run)
    return path


def _check_branch(path: Path, parts: dict[str, Any], meta: dict[str, Any], run: Run) -> None:
    """Check that this run, started at the trunk's step, gives the result of a run from its first step.

    The condition: every setting that affects the numbers is equal except
    for the schedule, and the schedules agree on all steps taken so far.
    Raises ValueError with the first step at which they differ.
    """
    if meta.get("trunk_identity") != run.plan.trunk_identity:
        raise ValueError(
            f"checkpoint.branch_from: {path} is from a run with another model, corpus, order, objective, "
            "batch, optimizer or seed. A branch may change lr_scheduler and evaluation only."
        )
    step = int(parts["iter"]["step"])
    schedule = build_schedule(run.config, run.plan)
    trunk_settings = {key: value for key, value in parts["lr"].items() if key != "step"}
    # exact equality of floats: equal settings
    # evaluate the same expression and give equal bits
    n_full = math.ceil(count_full_batches(run.config, int(parts["iter"]["next_sample"])))
    difference = schedule.first_difference(LearningRateSchedule(**trunk_settings), n_full)
    if step >= run.plan.n_steps or difference is not None:
        last = min(step, run.plan.n_steps) if difference is None else difference
        raise ValueError(
            f"checkpoint.branch_from: {path} has {step:,} steps, but its learning rates equal this run's "
            f"for the first {last:,} only. Branch from an earlier checkpoint, or start the decay later."
        )


def _refuse_damaged(run: Run) -> None:
    """Raise ValueError if all checkpoints are damaged: starting at step 0 would lose the run."""
    damaged = find_checkpoints(run.checkpoints, run.config.checkpoint.prefix)
    if damaged:
        names = ", ".join(checkpoint.path.name for checkpoint in damaged[-3:])
        raise ValueError(
            f"{run.checkpoints}: all {len(damaged)} checkpoints are damaged ({names}), expected an intact "
            "one. Restore one from a copy or give another with checkpoint.resume=PATH; to train again from "
            "the first step, which drops the metrics of this run, delete them or set checkpoint.resume=never."
        )


def _load_checkpoint(run: Run, path: Path) -> TrainState:
    """Load a checkpoint that rank 0 has verified; each rank reads the files it needs."""
    meta = store.read_meta(path)
    small = store.read_parts(path, meta, store.SHARED_PARTS)
    if store.is_sharded_checkpoint(meta):
        from megatron.checkpoint import sharded  # imported on demand: takes a second

        # DCP fills existing tensors: each rank reads
        # its part, whatever layout saved the checkpoint
        state_dict = run.engine.sharded_state()
        sharded.read_sharded(path, state_dict)
        state_dict["optim"] |= small["iter"].get("engine", {})
        run.engine.load_sharded_state(state_dict)
    else:
        whole = store.read_parts(path, meta, ("model", "optim")) if run.world.is_first else {}
        run.engine.load_state_dict(whole)
    # weights and data order depend on seeds and sample
    # numbers only; this covers other uses of the generator
    torch.set_rng_state(small["iter"]["rng"]["cpu"])
    state = TrainState.from_dict(small["iter"])
    run.train_samples.restore(small["iter"].get("mixture", {}))
    log.info("resuming after step %d from %s", state.step, path)
    return state


def describe_run(run: Run, state: TrainState) -> str:
    """Return one line that describes the run."""
    plan = run.plan
    return (
        f"{plan.name}: {plan.objective}, size {plan.size}, "
        f"N {plan.n_params:,} ({plan.n_non_embedding:,} without embedding), "
        f"{plan.train_tokens:,} tokens ({plan.epochs:.2f} epochs), steps {state.step} to {plan.n_steps:,}, "
        f"{plan.train_flops:.3g} FLOPs, {run.world.n_ranks} rank(s) on {run.world.device.type}"
    )


def describe_corpora(plan: RunPlan) -> list[str]:
    """Return one line per corpus with its share, epochs and repeated tokens."""
    if [corpus.prefix for corpus in plan.corpora] == [SYNTHETIC] and not plan.repeated_tokens:
        return ["  synthetic: random tokens, none repeated"]
    return [
        f"  {corpus.name}: {corpus.share:.2%} of the samples, {corpus.epochs:.2f} epochs of "
        f"{corpus.tokens:,} tokens; {corpus.unique_tokens:,} unique, {corpus.repeated_tokens:,} repeated"
        for corpus in plan.corpora
    ]


def _check_identity(path: Path, meta: dict[str, Any], run: Run) -> None:
    if meta["identity"] == run.plan.identity:
        return
    ours, theirs = config_to_dict(run.config), meta["config"]
    sections = ("model", "dataset", "objective", "optim", "lr_scheduler", "misc", "dist")
    # keys that do not change the identity may differ
    # as well: the list is a hint, the identity decides
    differ = [
        f"{section}.{key} was {theirs.get(section, {}).get(key)!r}, is {value!r}"
        for section in sections
        for key, value in ours[section].items()
        if theirs.get(section, {}).get(key) != value
    ]
    shared = run.config.checkpoint.directory is not None
    choice = "checkpoint.prefix or checkpoint.directory" if shared else "logging.run_dir"
    raise ValueError(
        f"{path}: checkpoint of another run ({'; '.join(differ[:4]) or 'its corpus has changed'}). "
        f"Choose another {choice}, or set checkpoint.resume=never to start from scratch."
    )
