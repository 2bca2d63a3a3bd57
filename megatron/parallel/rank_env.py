"""Rank of this process in its run, from the environment variables of torchrun, srun or MPI."""

import logging
import os
import re
import signal
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import NoReturn

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # set by torchrun and DeepSpeed
FIRST_PORT, N_PORTS = 12_000, 18_000  # below Linux's ephemeral ports, which begin at 32,768


def _name_alike(prefix: str) -> tuple[str, ...]:
    return tuple(prefix + name for name in ("RANK", "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


SRUN = "srun"
# launcher -> a variable that it alone sets, rank, number of ranks, local
# rank, ranks on this host; then those that identify the job on all ranks.
# The order matters: mpirun inside a Slurm job sets its variables per
# rank, beside Slurm's per node. SRUN precedes PMI in the table, because
# srun --mpi=pmi2 sets PMI_RANK too.
LAUNCHERS = {
    "Open MPI's mpirun": (*_name_alike("OMPI_COMM_WORLD_"), "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "MVAPICH2": (*_name_alike("MV2_COMM_WORLD_"), "PMI_JOBID"),
    "PALS": (
        "PALS_RANKID", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID",
    ),
    "Hydra's mpiexec": (
        "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID",
    ),
    SRUN: (
        "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID", "SLURM_STEP_ID",
    ),
    "PMI": (*_name_alike("PMI_"), "PMI_JOBID"),
}  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """Rank of this process, number of ranks, and the address of rank 0 (None for a single process).

    n_local   processes of the run on this host
    """

    rank: int = 0
    n_ranks: int = 1
    local_rank: int = 0
    n_local: int = 1
    address: str | None = None
    port: int | None = None


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """Return the ranks that the launcher's variables describe, or a single process without a launcher.

    Raises ValueError if only some of its variables are set, or if the host of
    rank 0 is unknown.
    """
    first = environment.get("LOCAL_RANK", "0") == "0"  # some sites set LOCAL_RANK=0 for single processes too
    if "WORLD_SIZE" in environment or "RANK" in environment or not first:
        rank, n_ranks, local_rank, port = _read_numbers(
            "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"), environment, "MASTER_ADDR"
        )
        n_local = _read_number("LOCAL_WORLD_SIZE", {"LOCAL_WORLD_SIZE": str(n_ranks), **environment})
        return Ranks(rank, n_ranks, local_rank, n_local, environment["MASTER_ADDR"], port)
    launchers = [name for name, (marker, *_) in LAUNCHERS.items() if marker in environment]
    # incomplete without its marker; Slurm's
    # variables are also set in a batch script
    launchers += [
        name for name, names in LAUNCHERS.items() if {*names[1:4]} & environment.keys() and name != SRUN
    ]
    if launchers:
        return _read_ranks(launchers[0], environment)
    n_tasks = _read_number("SLURM_NTASKS", {"SLURM_NTASKS": "1", **environment})
    if n_tasks > 1 and "SLURM_PROCID" in environment:
        raise ValueError(
            f"environment: a Slurm job of {environment['SLURM_NTASKS']} tasks, and this process is its batch "
            "script; start with srun, or unset SLURM_NTASKS for one process"
        )
    return Ranks()


def export_ranks(ranks: Ranks, environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables, which torch, DeepSpeed and the logger read."""
    if ranks.n_ranks > 1:
        values = (ranks.rank, ranks.n_ranks, ranks.local_rank, ranks.address, ranks.port)
        environment.update(zip(TORCHRUN_VARIABLES, map(str, values), strict=True))
        environment.update(dict.fromkeys(LOCAL_SIZES, str(ranks.n_local)))


def parse_first_host(hosts: str) -> str:
    """Return the first host of Slurm's host list: `n[03-05,9],gpu1` -> `n03`."""
    # up to the first comma outside brackets: n[03-05,9],gpu1 -> n[03-05,9]
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if match is None:
        raise ValueError(f"SLURM_JOB_NODELIST: got {hosts!r}, expected names such as n[03-05],gpu1")
    # n[03-05,9] -> n03: keep the text between "[" and the first of "-", "," or "]"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[0])


def _read_ranks(launcher: str, environment: Mapping[str, str]) -> Ranks:
    _, *names, local_size = LAUNCHERS[launcher][:5]
    rank, n_ranks, local_rank = _read_numbers(launcher, tuple(names), environment)
    if n_ranks == 1:
        return Ranks()  # one process needs no address, so none must be set
    # all ranks of a job compute the same port,
    # and jobs on one host are unlikely to collide
    # All ranks have the job id, so none needs to send a port to the others.
    job = "".join(environment.get(name, "") for name in LAUNCHERS[launcher][5:])
    port = FIRST_PORT + zlib.crc32(job.encode()) % N_PORTS
    if environment.get("MASTER_PORT"):
        port = _read_number("MASTER_PORT", environment)
    n_local = _count_local_ranks(launcher, environment.get(local_size, ""), environment)
    address = environment.get("MASTER_ADDR")
    # all ranks are on this host, and the loopback address needs no name resolution
    if not address and n_local == n_ranks:
        address = "127.0.0.1"
    if not address and environment.get("SLURM_JOB_NODELIST"):
        address = parse_first_host(environment["SLURM_JOB_NODELIST"])
    if not address:
        raise ValueError(
            f"environment: {launcher} started {n_ranks} processes on several hosts without the "
            "address of rank 0; set MASTER_ADDR to the first host on all of them"
        )
    return Ranks(rank, n_ranks, local_rank, n_local or 1, address, port)


def _count_local_ranks(launcher: str, value: str, environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this host, None if unknown. Slurm lists them by node: `8(x2),4`."""
    if launcher != SRUN:
        return int(value) if value.isdecimal() else None
    # "8(x2),4": two nodes with 8 tasks, then one with 4
    listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", value)
    by_node = [int(tasks) for tasks, times in listed for _ in range(int(times or 1))]
    # 8(x2),4 -> [8, 8, 4]; SLURM_NODEID counts from 0
    node = int(environment.get("SLURM_NODEID", "0"))
    return by_node[node] if node < len(by_node) else None


def _read_numbers(
    launcher: str, names: tuple[str, ...], environment: Mapping[str, str], *other_names: str
) -> list[int]:
    """Return the variables `names` as numbers. The first two are the rank and the number of ranks.

    Raises ValueError if one of them or of `other_names` is missing, or if the
    rank is out of range.
    """
    required = (*names, *other_names)
    fix = f"start with {launcher}, or unset them all for one process"
    if missing := [name for name in required if name not in environment]:
        present = [name for name in required if name in environment]
        raise ValueError(f"environment: {', '.join(present)} set without {', '.join(missing)}; {fix}")
    numbers = [_read_number(name, environment) for name in names]
    if numbers[0] >= numbers[1]:
        raise ValueError(
            f"environment: {names[0]} is {numbers[0]} and {names[1]} {numbers[1]}, expected a rank from 0 to "
            f"{numbers[1] - 1}; {fix}"
        )
    return numbers


def _read_number(name: str, environment: Mapping[str, str]) -> int:
    # not int(): it also accepts "+1", " 1" and "1_0"
    if not re.fullmatch("[0-9]{1,9}", environment[name]):
        raise ValueError(f"environment: {name} is {environment[name][:40]!r}, expected a number")
    return int(environment[name])


def exit_process(status: int) -> NoReturn:
    """End the process with a status.

    Signals are ignored from here on: the work is done, and the exit, which takes seconds, must keep this
    status. With DeepSpeed, skip the interpreter's shutdown: its threads sometimes abort there.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if "deepspeed" not in sys.modules:
        sys.exit(status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit flushes nothing, so the buffers were flushed above
    os._exit(status)
