"""Runs as processes on this machine, small ones side by side on a GPU or on the cores."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.launcher import forget
from megatron.run_dir import CONFIG
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

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher. A run that does not fit beside others does not keep smaller ones back."""
        jobs = []
        for run in runs:
            devices = self.place(run)
            if devices is not None:
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
        """None: they end with the sweep that started them."""
        return []

    def ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """See Launcher."""
        told = [(job, job.handle.poll()) for job in jobs]
        over = [(job, status) for job, status in told if status is not None]
        for job, _ in over:
            self.held.remove(job)
        return over

    def stop(self, jobs: Sequence[Job]) -> None:
        """See Launcher."""
        for job in jobs:
            if job.handle.poll() is None:
                job.handle.terminate()
        deadline = time.monotonic() + STOP_WAIT_S
        for job in jobs:
            try:
                job.handle.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(job.handle.pid, signal.SIGKILL)  # its own session; its ranks end with it
                job.handle.wait()

    def _process(self, run: PlannedRun, devices: Sequence[int]) -> "subprocess.Popen[bytes]":
        """What it prints goes to log.txt in its folder."""
        ranks = [str(START_RANKS), str(self.gpus_per_run)] if self.gpus_per_run > 1 else []
        words = [*ranks, str(PRETRAIN), str(run.folder / CONFIG)]
        with (run.folder / LOG).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(devices),
                # a Ctrl-C at the terminal goes to the sweep, which stops its runs in order
                start_new_session=True,
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
