"""Runs as processes on this machine, small ones side by side on a GPU or on the cores."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.command import STOPPED
from megatron.config.launcher import forget
from megatron.processes import die_with_parent, parent_variable
from megatron.run_dir import CONFIG, is_done
from megatron.scaling.claims import Claims
from megatron.scaling.ladder import PlannedRun
from megatron.scaling.launch import LOG, ROOT, STOP_WAIT_S, Job, prepare
from megatron.scaling.memory import bytes_of

PRETRAIN = ROOT / "tools" / "pretrain.py"
START_RANKS = ROOT / "tools" / "start_ranks.py"  # answers 75 where its ranks were preempted, torchrun 1
FULL = 0.9  # of a device's memory: estimates are estimates
# glibc gives big blocks back to the kernel at every free and faults them in again at the next tensor:
# keeping them makes small models on a CPU up to a third faster.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


@dataclass(frozen=True)
class Device:
    """A GPU, or all cores: how many runs it takes at a time, and bytes of memory."""

    places: int
    memory: float


class LocalLauncher:
    """Processes, each on the emptiest device that has room for it."""

    def __init__(self, devices: Sequence[Device], on_gpus: bool, gpus_per_run: int = 1) -> None:
        self.devices, self.on_gpus, self.gpus_per_run = list(devices), on_gpus, gpus_per_run
        self.held: list[Job] = []
        self.claims = Claims()

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher. A run that does not fit beside others does not keep smaller ones back."""
        jobs = []
        for run in runs:
            devices = self.place(run)
            if devices is None:
                continue
            if not self.claims.take(run):
                jobs.append(Job(run, None, elsewhere=True))
                continue
            prepare(run)
            job = Job(run, self._process(run, devices), devices)
            self.held.append(job)
            jobs.append(job)
        return jobs

    def place(self, run: PlannedRun) -> list[int] | None:
        """The devices that would take the run now, None where it has to wait.

        A run over several GPUs takes them for itself. One that no device could hold gets an empty one: the
        estimate may be wrong, and the run will say so itself.
        """
        load = [[job for job in self.held if k in job.devices] for k in range(len(self.devices))]
        if self.gpus_per_run > 1:
            empty = [k for k, jobs in enumerate(load) if not jobs]
            return empty[: self.gpus_per_run] if len(empty) >= self.gpus_per_run else None
        for k in sorted(range(len(self.devices)), key=lambda k: len(load[k])):
            used = sum(bytes_of(job.run.config) for job in load[k])
            fits = used + bytes_of(run.config) <= FULL * self.devices[k].memory
            if not load[k] or fits and len(load[k]) < self.devices[k].places:
                return [k]
        return None

    def running(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher: those that another process trains now, perhaps left by a sweep that was killed."""
        return [Job(run, None, elsewhere=True) for run in runs if self.claims.is_training(run)]

    def ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """See Launcher."""
        over = []
        for job in jobs:
            status = self._status_elsewhere(job) if job.elsewhere else self._status(job)
            if status is not None:
                over.append((job, status))
                self.claims.release(job.run)
        return over

    def _status_elsewhere(self, job: Job) -> int | None:
        if not self.claims.has_ended(job.run):
            return None
        return 0 if is_done(job.run.folder, job.run.plan.identity) else STOPPED

    def _status(self, job: Job) -> int | None:
        status = job.handle.poll()
        if status is None:
            return None
        self.held.remove(job)
        done = is_done(job.run.folder, job.run.plan.identity)
        if status and not done and self.claims.is_training(job.run):
            # started by hand at the same moment, and faster: it is waited for
            job.elsewhere, job.devices = True, []
            self.claims.release(job.run)
            return None
        return status

    def stop(self, jobs: Sequence[Job]) -> None:
        """See Launcher."""
        own = [job for job in jobs if not job.elsewhere]
        for job in own:
            if job.handle.poll() is None:
                job.handle.terminate()
        deadline = time.monotonic() + STOP_WAIT_S
        for job in own:
            try:
                job.handle.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(job.handle.pid, signal.SIGKILL)  # its own session; its ranks end with it
                job.handle.wait()

    def leave(self, jobs: Sequence[Job]) -> None:
        """See Launcher: processes end with the sweep that started them."""
        self.stop(jobs)

    def close(self) -> None:
        """See Launcher."""
        self.claims.release_all()

    def _process(self, run: PlannedRun, devices: Sequence[int]) -> "subprocess.Popen[bytes]":
        """What it prints goes to log.txt in its folder.

        It saves and ends when this process is gone, however that ended, within the time it has to stop.
        """
        ranks = [str(START_RANKS), str(self.gpus_per_run)] if self.gpus_per_run > 1 else []
        words = [*ranks, str(PRETRAIN), str(run.folder / CONFIG)]
        with (run.folder / LOG).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(devices) | parent_variable(STOP_WAIT_S),
                # a Ctrl-C at the terminal goes to the sweep, which stops its runs in order
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

    def _environment(self, devices: Sequence[int]) -> dict[str, str]:
        """For a child: its GPUs, or on a CPU one thread for each library and memory that is kept."""
        own = dict(os.environ)
        forget(own)
        if not self.on_gpus:
            return own | {"OMP_NUM_THREADS": own.get("OMP_NUM_THREADS", "1"), **KEEP_MEMORY}
        # of the GPUs that this process may see, where somebody has chosen some
        seen = [name for name in own.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(seen[k] if seen else str(k) for k in devices)
        return own
