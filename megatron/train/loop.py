"""The training loop."""

import gc
import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from megatron.checkpoint import store
from megatron.checkpoint.layout import find_checkpoints
from megatron.checkpoint.preempt import StopMonitor, watch_for_stop
from megatron.config.read import config_to_dict, write_config
from megatron.config.schema import RunConfig
from megatron.data.batches import SampleSource
from megatron.data.prefetch import prefetch
from megatron.evaluation.validate import HeldOutLoss, validate
from megatron.io import code_revision, replace_nonfinite, write_atomic, write_json
from megatron.log import get_logger
from megatron.objective.task import Task
from megatron.parallel.collectives import any_rank, barrier
from megatron.parallel.watchdog import mark_phase
from megatron.parallel.world import make_thread_init, open_world
from megatron.plan.run_dir import CONFIG, METRICS, PLAN, RESULT, lock_run, read_metrics
from megatron.plan.run_plan import RunPlan
from megatron.train.build import Run, build_run, build_schedule, count_full_batches
from megatron.train.feedback import Feedback
from megatron.train.memory_usage import explain_oom
from megatron.train.metrics_logger import MetricsLogger
from megatron.train.microbatch import list_microbatches
from megatron.train.profiler import ProfileWindow
from megatron.train.resume import describe_corpora, describe_run, resume_run
from megatron.train.saver import Saver
from megatron.train.state import TrainState

LOCK_WAIT_S = 2.0  # a sweep that probes for a running training locks the folder for a moment

log = get_logger(__name__)


def train_run(config: RunConfig, plan: RunPlan) -> bool:
    """Build and train a run on all ranks. Return False if it was stopped and saved before its end."""
    with open_world(config.dist, config.misc.n_threads) as world:
        list_microbatches(config, world)  # reports numbers that do not divide before anything is built
        run = build_run(config, plan, world)
        # a signal only sets `stop`; the loop saves a checkpoint after the current step and returns False
        with watch_for_stop(config.misc.stop_file, config.misc.max_hours) as stop:
            done = train(run, stop)
        if world.is_first and done:
            print(f"{run.folder}: done, {plan.train_tokens:,} tokens")
        return done


def train(run: Run, stop: StopMonitor) -> bool:
    """Train to the end of the plan or until a stop is requested. Return whether the run is done.

    Raises ValueError for a checkpoint of another run,
    FloatingPointError for a loss that is NaN or Inf.
    """
    with _lock_run_folder(run):
        mark_phase(0, "loading")
        state = resume_run(run)
        mark_phase(state.step, "starting")
        _prepare_folder(run, state)
        record = MetricsLogger(run.config, run.plan, run.world, run.folder, state.step)
        for line in (describe_run(run, state), *describe_corpora(run.plan)):
            log.info(line)
        for warning in run.plan.warnings if run.world.is_first else ():
            log.warning("%s", warning)
        n_steps, n_warmup = run.plan.n_steps, run.plan.warmup_steps
        if n_warmup > n_steps and run.world.is_first:
            text = "the run ends after %d of its %d warm-up steps: sufficient for a test, not for training"
            log.warning(text, n_steps, n_warmup)
        try:
            feed = open_feed(run, state.next_sample, run.plan.n_steps - state.step)
            # Later garbage collections skip the objects
            # of the start, which live as long as the run.
            # They would take hundreds of milliseconds,
            # on one rank while the others wait.
            gc.collect()
            gc.freeze()
            with feed as batches:
                state, done = _run_steps(run, state, batches, record, stop)
        finally:
            gc.unfreeze()
            record.close()
    return done


def open_feed(run: Run, first_sample: int, n_steps: int) -> AbstractContextManager[Iterator[list[Task]]]:
    """Return this rank's microbatches of `n_steps` steps, prepared by dataset.num_workers threads.

    Order, masks and other noise are functions of the sample numbers,
    so the number of workers does not change the result.
    """
    rows, sizes = run.microbatch_rows, run.batch_sizes
    first_step = sizes.count_steps(first_sample)
    on_gpu = run.world.device.type == "cuda"

    def make_tasks(step: int) -> list[Task]:
        first = sizes.samples_after(first_step + step)
        batch = run.open_batches(first).batch_at(first)
        # the noise is keyed by sample number: the
        # size of a microbatch changes rounding only
        parts = [slice(begin, begin + rows) for begin in range(0, len(batch.tokens), rows)]
        tasks = [run.objective.corrupt(batch.tokens[part], batch.numbers[part]) for part in parts]
        return [task.pin_memory() for task in tasks] if on_gpu else tasks

    return prefetch(make_tasks, n_steps, run.config.dataset.num_workers, make_thread_init(run.world.device))


@contextmanager
def _lock_run_folder(run: Run) -> Iterator[None]:
    """Lock the run's folder against a second training. All ranks raise if rank 0 cannot get the lock."""
    run_lock = lock_run(run.folder, LOCK_WAIT_S) if run.world.is_first else None
    if any_rank(run.world.is_first and run_lock is None, run.world):
        raise ValueError(f"{run.folder}: another process is training there. Wait for it or stop it.")
    try:
        yield
    finally:
        if run_lock is not None:
            run_lock.close()


def _run_steps(
    run: Run, state: TrainState, feed: Iterator[list[Task]], record: MetricsLogger, stop: StopMonitor
) -> tuple[TrainState, bool]:
    plan, config = run.plan, run.config
    schedule = build_schedule(config, plan)
    saver, feedback = Saver(run), Feedback(run)
    save_every = config.checkpoint.chkpt_saving_iterations or plan.n_steps
    save_at = frozenset(config.checkpoint.chkpt_at or ())
    score_every = config.evaluation.every_iterations or plan.n_steps
    rows = run.microbatch_rows
    window = ProfileWindow(config.logging.profile_steps, run.folder, run.world)
    started = time.perf_counter()
    record.restart_clock()
    if state.step == plan.n_steps:  # killed between the last checkpoint and the result
        return _score_and_save(run, state, record, None), True
    while state.step < plan.n_steps:
        # A signal may reach one rank only, at any moment.
        # All ranks decide together between two steps:
        # a rank that stopped alone would leave
        # the others waiting in a collective.
        stop_requested = any_rank(stop.should_stop(), run.world)
        # Both operands before any_rank are equal on all ranks: all of them enter
        # it or none. Local clocks differ, so one rank that is due makes all save.
        if stop_requested or saver.config.preempt_every_minutes and any_rank(saver.is_due(), run.world):
            record.check_finite()  # weights with NaN or Inf are never saved
            path = saver.save(state, preempt=True)
            record.restart_clock()
            started = time.perf_counter()  # elapsed_s counts training only
        if stop_requested:
            window.close(state.step)
            saver.wait()
            log.info("stopped by %s after step %d; saved %s", stop.reason or "another rank", state.step, path)
            return state, False
        lr = schedule(count_full_batches(config, state.next_sample))
        window.start_step(state.step + 1)
        with explain_oom(state.step + 1, "dataset.microbatch_size", rows, plan.seq_len, run.world):
            mark_phase(state.step + 1, "waiting for data")
            tasks = next(feed)  # blocks if the workers are behind
            mark_phase(state.step + 1, "training")
            feedback.observe(state, tasks)
            report = run.engine.step(tasks, lr)
        window.finish_step(state.step + 1)
        batch = run.open_batches(state.next_sample)
        record.accumulate(report, state.step + 1, batch.sample_range(state.next_sample))
        size = run.batch_sizes.size_at(state.next_sample)
        state = state.after_step(size, plan.seq_len, time.perf_counter() - started)
        started = time.perf_counter()
        last = state.step == plan.n_steps
        due_save = last or state.step % save_every == 0 or state.step in save_at
        # log_train checks for NaN and Inf first, so such weights are never saved
        if due_save or state.step % config.logging.every_iterations == 0:
            record.log_train(state, report, lr, feedback.get_domain_stats(state))
        if due_save or state.step % score_every == 0:
            state = _score_and_save(run, state, record, saver if due_save else None)
            record.restart_clock()
            started = time.perf_counter()
    return state, True


def _score_and_save(run: Run, state: TrainState, record: MetricsLogger, saver: Saver | None) -> TrainState:
    """Compute the held-out loss, save a checkpoint, and write the result at the end of the run.

    The loss is logged before the checkpoint appears. A run killed
    in between resumes from the previous checkpoint, drops the line
    and logs it again. In the other order the loss would never be logged.
    """
    held_out = test = averaged = None
    ends = state.step == run.plan.n_steps
    if run.held_out is not None:
        held_out = _score(run, state, run.held_out)
        state = state.after_validation(held_out.loss)
        if run.config.optim.ema_decay is not None:
            with run.engine.averaged_weights():
                averaged = _score(run, state, run.held_out).loss
    if run.test is not None and ends:
        test = _score(run, state, run.test)
    name = None if saver is None else saver.next_name()
    # a run killed between its last checkpoint and
    # its result: that checkpoint is the newest
    if ends and saver is None:
        checkpoints = find_checkpoints(run.checkpoints, run.config.checkpoint.prefix)
        name = checkpoints[-1].path.name if checkpoints else None
    if held_out is not None and not (ends and saver is None and _is_scored(run, state.step)):
        record.log_validation(state, held_out, name, averaged)
    if saver is not None:
        saver.save(state, name=name)
    if ends:
        if saver is not None:
            saver.wait()  # the result marks the run as done: the checkpoint must be complete
        if run.world.is_first:
            write_json(run.folder / RESULT, _build_result(run, state, held_out, averaged, test))
    return state


def _score(run: Run, state: TrainState, samples: SampleSource) -> HeldOutLoss:
    """Return the loss of held-out samples.

    Raises FloatingPointError for a loss that is NaN or Inf, before anything is saved. With
    misc.on_nonfinite=skip it is raised at the end only: a run without a loss is not done.
    """
    evaluation = run.config.evaluation
    rows = evaluation.batch_size
    with explain_oom(state.step, "evaluation.batch_size", rows, run.plan.seq_len, run.world):
        held_out = validate(
            run.engine,
            run.objective,
            samples,
            run.world,
            batch_size=evaluation.batch_size,
            num_mc=evaluation.num_mc,
            max_samples=evaluation.max_samples,
            n_workers=min(1, run.config.dataset.num_workers),
        )
    ends = state.step == run.plan.n_steps
    if math.isfinite(held_out.loss) or run.config.misc.on_nonfinite == "skip" and not ends:
        return held_out
    raise FloatingPointError(
        f"step {state.step}: got a held-out loss of {held_out.loss}, expected a finite number. "
        "Lower optim.lr, or look for a damaged corpus; nothing was saved at this step."
    )


def _is_scored(run: Run, step: int) -> bool:
    """Return whether metrics.jsonl already contains the held-out loss of a step."""
    return any(line["kind"] == "validation" and line["step"] == step for line in read_metrics(run.folder))


def _prepare_folder(run: Run, state: TrainState) -> None:
    """Write configuration and plan, and remove metrics and partial checkpoints after the resumed step."""
    if run.world.is_first:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_config(run.config, run.folder / CONFIG)
        write_json(run.folder / PLAN, run.plan.as_dict())
        if (run.folder / METRICS).exists():
            _truncate_metrics(run.folder, state.step)
        store.remove_old_checkpoints(run.checkpoints, run.config.checkpoint.prefix, None)
    # no rank may write a part of a checkpoint
    # before rank 0 has removed the partial ones
    barrier(run.world)


def _truncate_metrics(run: Path, step: int) -> None:
    """Drop the records after `step`, which a resumed run will log again."""
    # Python's json reads NaN, which JSON does not have: it is written back as null
    lines = [json.dumps(replace_nonfinite(line)) for line in read_metrics(run) if line["step"] <= step]
    write_atomic(run / METRICS, "".join(line + "\n" for line in lines))


def _build_result(
    run: Run,
    state: TrainState,
    held_out: HeldOutLoss | None,
    averaged: float | None,
    test: HeldOutLoss | None,
) -> dict[str, object]:
    device = run.world.device
    gpu = device.type == "cuda"
    tested = {} if test is None else {"test_loss": test.loss, "test_loss_se": test.loss_se}
    return {
        "identity": run.plan.identity,
        "loss": None if held_out is None else held_out.loss,
        "loss_se": None if held_out is None else held_out.loss_se,
        "mc_se": None if held_out is None else held_out.mc_se,
        "n_tokens_scored": 0 if held_out is None else held_out.n_tokens,
        **({} if averaged is None else {"loss_ema": averaged}),
        **({"loss_by_corpus": held_out.by_corpus} if held_out and held_out.by_corpus else {}),
        **tested,
        "step": state.step,
        "train_tokens": state.tokens_seen,
        "wall_s": state.elapsed_s,
        "train_flops": run.plan.train_flops,
        "tps_mean": state.tokens_seen / max(state.elapsed_s, 1e-9),
        "hardware": torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads",
        "n_ranks": run.world.n_ranks,
        "torch": torch.__version__,
        "git": code_revision(),
        "config": config_to_dict(run.config),
    }
