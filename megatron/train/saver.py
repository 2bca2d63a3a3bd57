"""Leaving checkpoints to go on from, in either layout, at once or in the background."""

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint import layout, store
from megatron.config.read import as_dict
from megatron.mixture.source import MixtureSamples
from megatron.parallel.reduce import any_rank, first_says
from megatron.parallel.watchdog import mark, wait_for_first
from megatron.revision import git_of_code
from megatron.run_dir import FULL
from megatron.train.build import Run, build_schedule
from megatron.train.state import TrainState


class Saver:
    """Writes the checkpoints of a run; every method is for all ranks together."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.told = run.config.checkpoint
        self.pending: Future[None] | None = None
        self.pool = ThreadPoolExecutor(1)
        self.last_save = time.monotonic()
        # the thread's collectives must not mix with those of the training
        alone = not (self.told.asynchronous and dist.is_initialized())
        self.group = None if alone else dist.new_group(backend="gloo", timeout=run.world.timeout)

    def next_name(self, preempt: bool = False) -> str:
        """Return a name for the next checkpoint, the same on every rank."""
        return first_says(layout.new_name(self.told.prefix, preempt), self.run.world)

    def save(self, state: TrainState, preempt: bool = False, name: str | None = None) -> Path:
        """Save, and return on every rank when it is on disk, or raise OSError on every rank.

        name    from `next_name`, where the caller needs it before; else a new one

        With checkpoint.asynchronous it returns when the state is copied; the name appears when all is
        written and summed up, and what fails is raised by the next `save` or `wait`.
        """
        self.wait()
        self.last_save = time.monotonic()
        mark(state.step, "saving")
        final = self.run.checkpoints / (name or self.next_name(preempt))
        if self.told.state_dict_type == "full":
            return self._save_full(state, final)
        return self._save_sharded(state, final)

    def wait(self) -> None:
        """Return when nothing is being written any more. OSError on every rank where that failed."""
        if self.pending is None:
            return
        error: OSError | None = None
        try:
            self.pending.result()
        except OSError as failed:
            error = failed
        self.pending = None
        self._agree(error, "being written")

    def is_due(self) -> bool:
        """Whether checkpoint.preempt_every_minutes have passed since the last save, by this rank's clock."""
        minutes = self.told.preempt_every_minutes
        return minutes is not None and time.monotonic() - self.last_save > 60 * minutes

    def _agree(self, error: OSError | None, what: str) -> None:
        mark(None, "waiting for the checkpoint")
        wait_for_first()
        if any_rank(error is not None, self.run.world):
            raise OSError(f"{self.run.checkpoints}: checkpoint {what} not saved ({_cause(error)}")

    def _save_full(self, state: TrainState, final: Path) -> Path:
        error: OSError | None = None
        engine = self.run.engine.state_dict()  # on every rank: collecting a sharded state takes them all
        if self.run.world.is_first:
            try:
                parts = {**engine, **_small_parts(self.run, state)}
                store.save_as(final, parts, _meta(self.run, state))
                self._remove_old(final)
            except OSError as failed:
                error = failed
        self._agree(error, f"of step {state.step}")
        return final

    def _save_sharded(self, state: TrainState, final: Path) -> Path:
        error: OSError | None = None
        held = self.run.engine.sharded_state()
        partial = final.with_name(final.name + layout.PARTIAL)
        if self.run.world.is_first:
            small = _small_parts(self.run, state)
            small["iter"]["engine"] = {key: told for key, told in held["optim"].items() if key != "state"}
            try:
                store.begin(final)
                store.write_parts(partial, small, store.IN_BOTH)
            except OSError as failed:
                shutil.rmtree(partial, ignore_errors=True)
                error = failed
        self._agree(error, f"of step {state.step}")
        meta: dict[str, Any] = {}
        if self.run.world.is_first:
            meta = {**_meta(self.run, state), "state_dict_type": "sharded"}
        from megatron.checkpoint import sharded  # imports for a second; full checkpoints do without

        writing = sharded.write_soon(partial, held, self.group) if self.told.asynchronous else None
        if writing is None:
            try:
                sharded.write(partial, held)
                self._seal(partial, final, meta)
            except OSError as failed:
                shutil.rmtree(partial, ignore_errors=True)
                error = failed
            self._agree(error, f"of step {state.step}")
        else:
            self.pending = self.pool.submit(self._finish, writing, partial, final, meta)
        return final

    def _finish(self, writing: Future, partial: Path, final: Path, meta: dict[str, Any]) -> None:
        try:
            from megatron.checkpoint import sharded

            sharded.finish(partial, writing)
            self._seal(partial, final, meta)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _seal(self, partial: Path, final: Path, meta: dict[str, Any]) -> None:
        # DCP returns on rank 0 when every rank's files are written
        if self.run.world.is_first:
            store.seal(partial, final, meta)
            self._remove_old(final)

    def _remove_old(self, saved: Path) -> None:
        told = self.told
        store.remove_old(
            self.run.checkpoints, told.prefix, told.keep_last, told.keep_every, told.chkpt_at or (), saved
        )


def _cause(error: OSError | None) -> str:
    """What the system said, of which file, and what to do about it; closes the bracket."""
    if error is None:
        return "on another rank)"
    if error.errno is None:
        return f"{error})"
    hint = "; make room and run the same command again" if error.errno in FULL else ""
    return f"{error.filename}: {error.strerror}){hint}"


def _small_parts(run: Run, state: TrainState) -> dict[str, Any]:
    told = state.as_dict(run.train_samples.samples_per_epoch)
    if isinstance(run.train_samples, MixtureSamples):
        told["mixture"] = run.train_samples.state(state.step)
    told["rng"] = {"cpu": torch.get_rng_state()}
    return {"lr": {"step": state.step, **build_schedule(run.config, run.plan).as_dict()}, "iter": told}


def _meta(run: Run, state: TrainState) -> dict[str, Any]:
    told = run.config.checkpoint
    return {
        "generation": store.next_generation(run.checkpoints, told.prefix, state.step),
        "identity": run.plan.identity,
        "trunk_identity": run.plan.trunk_identity,
        "step": state.step,
        "tokens_seen": state.tokens_seen,
        "config": as_dict(run.config),
        "n_ranks": run.world.n_ranks,
        "git": git_of_code(),
        "torch": torch.__version__,
    }
