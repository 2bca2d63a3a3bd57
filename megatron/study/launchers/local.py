"""Launcher of runs as processes on this machine; several small runs share a GPU or the CPU."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.cli import STOPPED, TOOLS, die_with_parent
from megatron.plan.memory import estimate_memory
from megatron.plan.run_dir import CONFIG
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import LOG, PRETRAIN, STOP_WAIT_S, Job, Launcher, is_free, prepare_run

START_RANKS = TOOLS / "start_ranks.py"  # exits with 75 if its ranks were preempted; torchrun exits with 1
MAX_MEMORY_SHARE = 0.9  # share of a device's memory, since memory use is an estimate
# glibc returns large blocks to the kernel at every free, and the next tensor
# faults the pages in again. Keeping the blocks makes small models on a CPU up
# to a third faster.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
# set by torchrun, DeepSpeed, srun and MPI's
# launchers for each rank (parallel/rank_env.py)
LAUNCHER_VARIABLE = re.compile(
    r"RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|LOCAL_(RANK|SIZE|WORLD_SIZE)|SLURM_(STEP_ID|PROCID|NTASKS|LOCALID)"
    r"|(OMPI_COMM_WORLD|MV2_COMM_WORLD|PALS|PMI)_[A-Z_]+|MPI_LOCAL(RANKID|NRANKS)"
)


@dataclass(frozen=True)
class Device:
    """A GPU, or all CPU cores: number of concurrent runs, and bytes of memory."""

    slots: int
    memory: float


def query_gpus() -> list[tuple[str, float]]:
    """Return (name, bytes of memory) of this machine's NVIDIA GPUs; empty if nvidia-smi fails.

    The memory of a GPU that shares the host's memory is not
    reported: it is 0, and the GPU gets one run at a time.
    """
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    # names can contain commas, so the split is at the last one
    # "[N/A]" instead of a number of MiB: a GPU that shares the host's memory
    fields = [line.rpartition(",") for line in result.stdout.splitlines() if "," in line]
    return [(name.strip(), float(mib) * 2**20 if mib.strip().isdigit() else 0.0) for name, _, mib in fields]


class LocalLauncher(Launcher):
    """Starts each run as a process on the least occupied device with room for it."""

    def __init__(self, devices: Sequence[Device], on_gpus: bool, gpus_per_run: int = 1) -> None:
        self.devices, self.on_gpus, self.gpus_per_run = list(devices), on_gpus, gpus_per_run
        self.active: list[Job] = []
        self.n_slots = sum(device.slots for device in self.devices)
        if gpus_per_run > 1:
            self.n_slots = max(1, len(self.devices) // gpus_per_run)

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher. A run that does not fit does not delay smaller ones after it."""
        jobs = []
        for run in runs:
            devices = self.choose_devices(run)
            # continue, not break: a later and smaller run may still fit. A run is
            # not free if a training that outlived its sweep still saves, or if it
            # has become done since the plan.
            if devices is None or not is_free(run):
                continue
            prepare_run(run)
            # order: config.yaml is written
            # before the process that reads it is started
            job = Job(run, self._start_process(run, devices), devices)
            self.active.append(job)
            jobs.append(job)
        return jobs

    def choose_devices(self, run: PlannedRun) -> list[int] | None:
        """Return the devices for a run, or None if it must wait.

        A run over several GPUs gets them exclusively.
        A run that exceeds the memory of every device
        gets an empty one: the estimate may be wrong,
        and otherwise the run reports the error itself.
        """
        # load[k]: the jobs on device k. Example with 2 devices and 4 slots:
        # [[a, b], [c]]; device 1 is tried first.
        load = [[job for job in self.active if k in job.devices] for k in range(len(self.devices))]
        if self.gpus_per_run > 1:
            # all or nothing: a run that waited with some of its GPUs could
            # block another one that does the same
            empty = [k for k, jobs in enumerate(load) if not jobs]
            return empty[: self.gpus_per_run] if len(empty) >= self.gpus_per_run else None
        for k in sorted(range(len(self.devices)), key=lambda k: len(load[k])):
            # estimates are summed per device,
            # because processes cannot share memory
            used = sum(estimate_memory(job.run.config) for job in load[k])
            fits = used + estimate_memory(run.config) <= MAX_MEMORY_SHARE * self.devices[k].memory
            # an empty device always accepts a run, even one that
            # exceeds the estimate. A device of unknown memory (0,
            # for example a GPU that shares the host's memory)
            # never fits, so it gets one run at a time.
            if not load[k] or fits and len(load[k]) < self.devices[k].slots:
                return [k]
        return None

    def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """See Launcher."""
        over = []
        for job in jobs:
            status = job.handle.poll()
            if status is None:
                continue
            self.active.remove(job)
            # a process that was started by hand locked the run first: the
            # run has not failed
            if status and not is_free(job.run):
                status = STOPPED
            over.append((job, status))
        return over

    def stop(self, jobs: Sequence[Job]) -> None:
        """See Launcher."""
        for job in jobs:
            if job.handle.poll() is None:
                job.handle.terminate()
        # all jobs are signalled first and then waited for,
        # so that they save concurrently. One deadline
        # for all jobs: 60 s in total, not 60 s for each
        deadline = time.monotonic() + STOP_WAIT_S
        for job in jobs:
            try:
                job.handle.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                # the job leads its own session, which contains its ranks
                os.killpg(job.handle.pid, signal.SIGKILL)
                job.handle.wait()

    def _start_process(self, run: PlannedRun, devices: Sequence[int]) -> "subprocess.Popen[bytes]":
        """Start a run; its output goes to log.txt in its folder.

        The run saves and stops when this process has ended for any reason.
        """
        ranks = [str(START_RANKS), str(self.gpus_per_run)] if self.gpus_per_run > 1 else []
        words = [*ranks, str(PRETRAIN), str(run.folder / CONFIG)]
        # append mode keeps the output of earlier starts. The child has a copy
        # of the descriptor, so the parent can close its own at once.
        with (run.folder / LOG).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._make_environment(devices),
                # Ctrl-C in the terminal signals only the sweep, which then
                # stops its runs in order
                start_new_session=True,
                # if the sweep is killed, the kernel sends SIGTERM, on which
                # the run saves
                preexec_fn=die_with_parent(signal.SIGTERM),
            )

    def _make_environment(self, devices: Sequence[int]) -> dict[str, str]:
        """Return a child's environment: its GPUs, or on a CPU one thread per library and KEEP_MEMORY."""
        # A sweep that was started by torchrun or srun has
        # RANK and WORLD_SIZE set. Inherited, they would
        # make the run wait for ranks that do not exist.
        variables = os.environ.items()
        environment = {name: value for name, value in variables if not LAUNCHER_VARIABLE.fullmatch(name)}
        # one thread for each run: with one run per core, more threads would
        # compete for the same cores
        if not self.on_gpus:
            return environment | {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"), **KEEP_MEMORY}
        # CUDA_VISIBLE_DEVICES may be set already: device k is then the k-th
        # of its entries
        seen = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen[k] if seen else str(k) for k in devices)
        return environment
