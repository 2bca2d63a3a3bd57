"""Saving of checkpoints, full or sharded, synchronously or in the background."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint import layout, store
from megatron.config.read import config_to_dict
from megatron.io import DISK_FULL_ERRNOS, PARTIAL, code_revision, create_partial_folder
from megatron.parallel.collectives import any_rank, broadcast_string
from megatron.parallel.watchdog import mark_phase, wait_for_rank_0
from megatron.train.build import Run, build_schedule
from megatron.train.state import TrainState


class Saver:
    """Writes the checkpoints of a run. Every method is collective over all ranks."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.config = run.config.checkpoint
        self.pending: Future[None] | None = None
        self.pool = ThreadPoolExecutor(1)
        self.last_save = time.monotonic()
        # The background thread needs its own process
        # group: collectives of one group must
        # be issued in the same order on all ranks,
        # which two threads cannot guarantee.
        alone = not (self.config.asynchronous and dist.is_initialized())
        self.group = None if alone else dist.new_group(backend="gloo", timeout=run.world.timeout)

    def next_name(self, preempt: bool = False) -> str:
        """Return a name for the next checkpoint, the same on every rank."""
        return broadcast_string(layout.new_checkpoint_name(self.config.prefix, preempt), self.run.world)

    def save(self, state: TrainState, preempt: bool = False, name: str | None = None) -> Path:
        """Save a checkpoint. Return on every rank when it is on disk, or raise OSError on every rank.

        name    result of `next_name` if the caller needs it earlier; otherwise a new one

        With checkpoint.asynchronous it returns when the state has been copied.
        The final name appears when everything is written and has
        its checksums. An error is raised by the next `save` or `wait`.
        """
        # at most one checkpoint is being written; an
        # error of the previous one is raised here
        self.wait()
        self.last_save = time.monotonic()
        mark_phase(state.step, "saving")
        final = self.run.checkpoints / (name or self.next_name(preempt))
        if self.config.state_dict_type == "full":
            return self._save_full(state, final)
        return self._save_sharded(state, final)

    def wait(self) -> None:
        """Wait for a checkpoint that is being written. Raises OSError on every rank if it failed."""
        if self.pending is None:
            return
        error: OSError | None = None
        try:
            self.pending.result()
        except OSError as failed:
            error = failed
        self.pending = None
        self._raise_on_any_rank(error, "being written")

    def is_due(self) -> bool:
        """Return whether checkpoint.preempt_every_minutes have passed since the last save, by local time."""
        minutes = self.config.preempt_every_minutes
        return minutes is not None and time.monotonic() - self.last_save > 60 * minutes

    def _raise_on_any_rank(self, error: OSError | None, what: str) -> None:
        # without this agreement a rank whose disk is full
        # would raise while the others enter a collective
        mark_phase(None, "waiting for the checkpoint")
        wait_for_rank_0()
        if any_rank(error is not None, self.run.world):
            raise OSError(f"{self.run.checkpoints}: checkpoint {what} not saved ({_describe_error(error)}")

    def _save_full(self, state: TrainState, final: Path) -> Path:
        error: OSError | None = None
        # gathers one tensor at a time: rank 0 has the whole
        # state in host memory, other ranks one full tensor
        engine = self.run.engine.state_dict()  # on every rank: it is collective
        if self.run.world.is_first:
            try:
                parts = {**engine, **_build_small_parts(self.run, state)}
                store.save_checkpoint(final, parts, _build_meta(self.run, state))
                self._remove_old(final)
            except OSError as failed:
                error = failed
        self._raise_on_any_rank(error, f"of step {state.step}")
        return final

    def _save_sharded(self, state: TrainState, final: Path) -> Path:
        error: OSError | None = None
        state_dict = self.run.engine.sharded_state()
        partial = final.with_name(final.name + PARTIAL)
        meta: dict[str, Any] = {}
        if self.run.world.is_first:
            small = _build_small_parts(self.run, state)
            small["iter"]["engine"] = {
                key: value for key, value in state_dict["optim"].items() if key != "state"
            }
            # before anything is written: it refuses
            # values that the layout cannot store
            meta = {"state_dict_type": "sharded", store.STATE: store.encode_state(small)}
            try:
                create_partial_folder(final)
            except OSError as failed:
                error = failed
        # also a barrier: the folder exists before any other rank writes to it
        self._raise_on_any_rank(error, f"of step {state.step}")
        if self.run.world.is_first:
            meta |= _build_meta(self.run, state)
        from megatron.checkpoint import sharded  # imports for a second; full checkpoints do without

        # asynchronous: the state is copied before this
        # returns, so the next step may change the weights
        if self.config.asynchronous:
            writing = sharded.write_sharded_async(partial, state_dict, self.group)
            # one thread and at most one pending save:
            # `save` waits for the previous one first
            self.pending = self.pool.submit(
                self._commit, lambda: sharded.wait_for_write(partial, writing), final, meta
            )
            return final
        try:
            self._commit(lambda: sharded.write_sharded(partial, state_dict), final, meta)
        except OSError as failed:
            error = failed
        self._raise_on_any_rank(error, f"of step {state.step}")
        return final

    def _commit(self, write: Callable[[], object], final: Path, meta: dict[str, Any]) -> None:
        """Write the tensors; then rank 0 adds the checksums and gives the folder its final name."""
        partial = final.with_name(final.name + PARTIAL)
        try:
            write()
            # DCP returns on rank 0 only after all ranks have written their files
            if self.run.world.is_first:
                store.commit_checkpoint(partial, final, meta)
                self._remove_old(final)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _remove_old(self, saved: Path) -> None:
        config = self.config
        kept_steps = (config.keep_last, config.keep_every, config.chkpt_at or ())
        store.remove_old_checkpoints(self.run.checkpoints, config.prefix, *kept_steps, saved)


def _describe_error(error: OSError | None) -> str:
    """Describe an error with file, system message and fix; the text closes the caller's parenthesis."""
    # only the rank with the error has its text; the others report that it happened
    if error is None:
        return "on another rank)"
    if error.errno is None:
        return f"{error})"
    hint = "; make room and run the same command again" if error.errno in DISK_FULL_ERRNOS else ""
    return f"{error.filename}: {error.strerror}){hint}"


def _build_small_parts(run: Run, state: TrainState) -> dict[str, Any]:
    state_dict = state.as_dict(run.train_samples.samples_per_epoch)
    samples_state = run.train_samples.state(state.step)
    if samples_state:  # for a mixture; the samples of other sources follow from their numbers
        state_dict["mixture"] = samples_state
    state_dict["rng"] = {"cpu": torch.get_rng_state()}
    return {"lr": {"step": state.step, **build_schedule(run.config, run.plan).as_dict()}, "iter": state_dict}


def _build_meta(run: Run, state: TrainState) -> dict[str, Any]:
    config = run.config.checkpoint
    return {
        "generation": store.next_generation(run.checkpoints, config.prefix, state.step),
        "identity": run.plan.identity,
        "trunk_identity": run.plan.trunk_identity,
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "config": config_to_dict(run.config),
        "n_ranks": run.world.n_ranks,
        "git": code_revision(),
        "torch": torch.__version__,
    }
