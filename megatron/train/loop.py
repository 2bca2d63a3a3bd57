"""The training loop."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.checkpoint import store
from megatron.checkpoint.layout import find
from megatron.checkpoint.preempt import Stop
from megatron.config.read import as_dict, write_config
from megatron.evaluation.validate import HeldOut, validate
from megatron.log import get_logger
from megatron.objective.base import Task
from megatron.parallel.reduce import any_rank, wait_for_all
from megatron.parallel.watchdog import mark
from megatron.revision import git_of_code
from megatron.run_dir import (
    CONFIG,
    METRICS,
    PLAN,
    RESULT,
    forget_metrics_after,
    lock,
    read_metrics,
    write_json,
)
from megatron.train.build import Run, build_schedule, microbatch_rows
from megatron.train.feed import open_feed
from megatron.train.feedback import Feedback
from megatron.train.memory import explained
from megatron.train.profiler import ProfileWindow
from megatron.train.record import Record
from megatron.train.resume import describe, describe_data, resume
from megatron.train.saver import Saver
from megatron.train.state import TrainState

PROBED_S = 2.0  # a sweep that looks whether a run is being trained locks it for a moment

log = get_logger(__name__)


def train(run: Run, stop: Stop) -> bool:
    """Train to the end of the plan, or until asked to stop. Returns whether the run is done.

    Raises ValueError for a checkpoint of another run, FloatingPointError for a loss that is no number.
    """
    with _own_folder(run):
        mark(0, "loading")
        state = resume(run)
        mark(state.step, "starting")
        _prepare_folder(run, state)
        record = Record(run.config, run.plan, run.world, run.folder, state.step)
        for line in (describe(run, state), *describe_data(run.plan)):
            log.info(line)
        for warning in run.plan.warnings if run.world.is_first else ():
            log.warning("%s", warning)
        if run.plan.warmup_steps > run.plan.n_steps and run.world.is_first:
            log.warning(
                "the run ends after %d of its %d warm-up steps: enough to try a machine, not to train",
                run.plan.n_steps,
                run.plan.warmup_steps,
            )
        try:
            with open_feed(run, state.next_sample, run.plan.n_steps - state.step) as feed:
                state, done = _steps(run, state, feed, record, stop)
        finally:
            record.close()
    return done


@contextmanager
def _own_folder(run: Run) -> Iterator[None]:
    """Keep a second training out of the run's folder; all ranks hear of one that is already there."""
    held = lock(run.folder, PROBED_S) if run.world.is_first else None
    if any_rank(run.world.is_first and held is None, run.world):
        raise ValueError(f"{run.folder}: another process is training there; wait for it or stop it")
    try:
        yield
    finally:
        if held is not None:
            held.close()


def _steps(
    run: Run, state: TrainState, feed: Iterator[list[Task]], record: Record, stop: Stop
) -> tuple[TrainState, bool]:
    plan, config = run.plan, run.config
    schedule = build_schedule(config, plan)
    batches = run.batches(state.next_sample)
    saver, feedback = Saver(run), Feedback(run)
    save_every = config.checkpoint.chkpt_saving_iterations or plan.n_steps
    save_at = frozenset(config.checkpoint.chkpt_at or ())
    score_every = config.evaluation.every_iterations or plan.n_steps
    rows = microbatch_rows(config, run.world)
    window = ProfileWindow(config.logging.profile_steps, run.folder, run.world)
    started = time.perf_counter()
    record.restart_clock()
    if state.step == plan.n_steps:  # killed between the last checkpoint and the result
        return _score_and_save(run, state, record, None), True
    while state.step < plan.n_steps:
        asked = any_rank(stop.asked(), run.world)
        if asked or saver.told.preempt_every_minutes and any_rank(saver.is_due(), run.world):
            record.check()  # weights that are no numbers are never saved
            path = saver.save(state, preempt=True)
            record.restart_clock()
            started = time.perf_counter()  # elapsed_s counts training, here as at every other save
        if asked:
            window.close(state.step)
            saver.wait()
            log.info("stopped by %s after step %d; saved %s", stop.reason or "another rank", state.step, path)
            return state, False
        lr = schedule(state.step)
        window.before(state.step + 1)
        with explained(state.step + 1, "dataset.microbatch_size", rows, plan.seq_len, run.world):
            mark(state.step + 1, "waiting for data")
            tasks = next(feed)
            mark(state.step + 1, "training")
            feedback.observe(state, tasks)
            report = run.engine.step(tasks, lr)
        window.after(state.step + 1)
        record.add(report, state.step + 1, batches.samples_of(state.next_sample))
        state = state.after_step(config.dataset.batch_size, plan.seq_len, time.perf_counter() - started)
        started = time.perf_counter()
        record.memory(state.step)
        last = state.step == plan.n_steps
        due_save = last or state.step % save_every == 0 or state.step in save_at
        # telling a step checks it: weights that are no numbers are never saved
        if due_save or state.step % config.logging.every_iterations == 0:
            record.train(state, report, lr, feedback.told(state))
        if due_save or state.step % score_every == 0:
            state = _score_and_save(run, state, record, saver if due_save else None)
            record.restart_clock()
            started = time.perf_counter()
    return state, True


def _score_and_save(run: Run, state: TrainState, record: Record, saver: Saver | None) -> TrainState:
    """Held-out loss, checkpoint, and at the end the result: every checkpoint is scored.

    The loss is logged before the checkpoint appears. A run killed in between resumes from the checkpoint
    before, drops the line and repeats it; in the other order it would never be logged.
    """
    held_out = None
    if run.held_out is not None:
        evaluation = run.config.evaluation
        rows = evaluation.batch_size
        with explained(state.step, "evaluation.batch_size", rows, run.plan.seq_len, run.world):
            held_out = validate(
                run.engine,
                run.objective,
                run.held_out,
                run.world,
                batch_size=evaluation.batch_size,
                num_mc=evaluation.num_mc,
                max_samples=evaluation.max_samples,
            )
        _check_held_out(run, state, held_out)
        state = state.after_validation(held_out.loss)
    name = None if saver is None else saver.next_name()
    ends = state.step == run.plan.n_steps
    if ends and saver is None:
        found = find(run.checkpoints, run.config.checkpoint.prefix)
        name = found[-1].path.name if found else None
    if held_out is not None and not (ends and saver is None and _is_scored(run, state.step)):
        record.validation(state, held_out, name)
    if saver is not None:
        saver.save(state, name=name)
    if ends:
        if saver is not None:
            saver.wait()  # the result says that the run is done: nothing may be missing behind it
        if run.world.is_first:
            write_json(run.folder / RESULT, _result(run, state, held_out))
    return state


def _check_held_out(run: Run, state: TrainState, held_out: HeldOut) -> None:
    """FloatingPointError for a held-out loss that is NaN or Inf, before anything is saved.

    With misc.on_nonfinite=skip only at the end: a run without a loss is not done.
    """
    ends = state.step == run.plan.n_steps
    if math.isfinite(held_out.loss) or run.config.misc.on_nonfinite == "skip" and not ends:
        return
    raise FloatingPointError(
        f"step {state.step}: got a held-out loss of {held_out.loss}, expected a finite number. "
        "Lower optim.lr, or look for a damaged corpus; nothing was saved at this step."
    )


def _is_scored(run: Run, step: int) -> bool:
    """Whether metrics.jsonl has the held-out loss of a step already."""
    return any(line["kind"] == "validation" and line["step"] == step for line in read_metrics(run.folder))


def _prepare_folder(run: Run, state: TrainState) -> None:
    """Write down what will run, once, before the first step."""
    if run.world.is_first:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_config(run.config, run.folder / CONFIG)
        write_json(run.folder / PLAN, run.plan.as_dict())
        if (run.folder / METRICS).exists():
            forget_metrics_after(run.folder, state.step)
        store.remove_old(run.checkpoints, run.config.checkpoint.prefix, None)
    wait_for_all(run.world)


def _result(run: Run, state: TrainState, held_out: HeldOut | None) -> dict[str, object]:
    device = run.world.device
    gpu = device.type == "cuda"
    return {
        "identity": run.plan.identity,
        "loss": None if held_out is None else held_out.loss,
        "loss_se": None if held_out is None else held_out.loss_se,
        "mc_se": None if held_out is None else held_out.mc_se,
        "n_tokens_scored": 0 if held_out is None else held_out.n_tokens,
        "step": state.step,
        "train_tokens": state.tokens_seen,
        "wall_s": state.elapsed_s,
        "train_flops": run.plan.train_flops,
        "tps_mean": state.tokens_seen / max(state.elapsed_s, 1e-9),
        "hardware": torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads",
        "n_ranks": run.world.n_ranks,
        "torch": torch.__version__,
        "git": git_of_code(),
        "config": as_dict(run.config),
    }
