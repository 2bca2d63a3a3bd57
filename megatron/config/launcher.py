"""Who this process is among those of a run, as torchrun, srun or MPI tells it in the environment."""

import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")  # torchrun's word and DeepSpeed's
FIRST_PORT, N_PORTS = 12_000, 18_000  # below the ports that Linux hands out by itself, from 32,768 on


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. `sign` is set by it alone; `jobs` name the job to all ranks."""

    name: str
    sign: str
    rank: str
    n_ranks: str
    local_rank: str
    n_local: str
    jobs: tuple[str, ...]


# In this order: mpirun inside a Slurm job leaves Slurm's words for each node beside its own for each rank.
SRUN = Launcher(
    "srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)  # fmt: skip
LAUNCHERS = (
    Launcher(
        "Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", ("PMI_JOBID",),
    ),
    Launcher(
        "PALS", "PALS_RANKID", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE",
        ("PALS_APID",),
    ),
    Launcher(
        "Hydra's mpiexec", "MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        ("PMI_JOBID",),
    ),
    SRUN,
    Launcher("PMI", "PMI_RANK", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", ("PMI_JOBID",)),
)  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """This process among all of a run, and where rank 0 listens; no address where there is one process.

    n_local   processes of the run on this host
    """

    rank: int = 0
    n_ranks: int = 1
    local_rank: int = 0
    n_local: int = 1
    address: str | None = None
    port: int | None = None


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """What the launcher says; one process where there is no launcher.

    Raises ValueError where only half of its variables are set, or where nobody says on which host rank 0 is.
    """
    first = environment.get("LOCAL_RANK", "0") == "0"  # set for one process too, by some
    if "WORLD_SIZE" in environment or "RANK" in environment or not first:
        rank, n_ranks, local_rank, port = _numbers(
            "torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"), environment, ("MASTER_ADDR",)
        )
        n_local = _number("LOCAL_WORLD_SIZE", environment) if "LOCAL_WORLD_SIZE" in environment else n_ranks
        return Ranks(rank, n_ranks, local_rank, n_local, environment["MASTER_ADDR"], port)
    for launcher in LAUNCHERS:
        if launcher.sign in environment:
            return _launched(launcher, environment)
    for launcher in LAUNCHERS:  # without its sign it is half there; Slurm's words are those of a batch script
        told = {launcher.rank, launcher.n_ranks, launcher.local_rank} & environment.keys()
        if told and launcher is not SRUN:
            return _launched(launcher, environment)
    if _number("SLURM_NTASKS", {"SLURM_NTASKS": "1", **environment}) > 1 and "SLURM_PROCID" in environment:
        raise ValueError(
            f"environment: a Slurm job of {environment['SLURM_NTASKS']} tasks, and this is its batch script; "
            "start with srun, or unset SLURM_NTASKS for one process"
        )
    return Ranks()


def export(ranks: Ranks, environment: MutableMapping[str, str]) -> None:
    """Say it in torchrun's words, which torch, DeepSpeed and the logger read."""
    if ranks.n_ranks > 1:
        told = (ranks.rank, ranks.n_ranks, ranks.local_rank, ranks.address, ranks.port)
        environment.update(zip(TORCH, map(str, told), strict=True))
        environment.update(dict.fromkeys(LOCAL_SIZES, str(ranks.n_local)))


def forget(environment: MutableMapping[str, str]) -> None:
    """Take out all that a launcher says, for a child that is a run of its own."""
    names = {name for one in LAUNCHERS for name in (one.sign, one.rank, one.n_ranks, one.local_rank)}
    for name in (*TORCH, *LOCAL_SIZES, *names):
        environment.pop(name, None)


def first_host(hosts: str) -> str:
    """The first of Slurm's host list: `n[03-05,9],gpu1` -> `n03`."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if found is None:
        raise ValueError(f"SLURM_JOB_NODELIST: found {hosts!r}, wanted names such as n[03-05],gpu1")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", found[0])


def _launched(launcher: Launcher, environment: Mapping[str, str]) -> Ranks:
    rank, n_ranks, local_rank = _numbers(
        launcher.name, (launcher.rank, launcher.n_ranks, launcher.local_rank), environment
    )
    if n_ranks == 1:
        return Ranks()
    job = "".join(environment.get(name, "") for name in launcher.jobs)
    port = FIRST_PORT + zlib.crc32(job.encode()) % N_PORTS
    if environment.get("MASTER_PORT"):
        port = _number("MASTER_PORT", environment)
    n_local = _n_local(launcher, environment)
    address = _address(launcher, n_ranks, n_local, environment)
    return Ranks(rank, n_ranks, local_rank, n_local or 1, address, port)


def _n_local(launcher: Launcher, environment: Mapping[str, str]) -> int | None:
    """Ranks on this host; None where nobody says. Slurm lists them by node: `8(x2),4`."""
    if launcher is not SRUN:
        told = environment.get(launcher.n_local, "")
        return int(told) if told.isdecimal() else None
    listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    by_node = [int(tasks) for tasks, times in listed for _ in range(int(times or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    return by_node[node] if node < len(by_node) else None


def _address(launcher: Launcher, n_ranks: int, n_local: int | None, environment: Mapping[str, str]) -> str:
    """Where rank 0 is: as told, else this host when all ranks are on it, else the first host of the job."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    if n_local == n_ranks:
        return "127.0.0.1"
    if environment.get("SLURM_JOB_NODELIST"):
        return first_host(environment["SLURM_JOB_NODELIST"])
    raise ValueError(
        f"environment: {launcher.name} started {n_ranks} processes on several hosts and does not say where "
        "rank 0 is; set MASTER_ADDR to the first host on all of them"
    )


def _numbers(
    launcher: str, names: tuple[str, ...], environment: Mapping[str, str], beside: tuple[str, ...] = ()
) -> list[int]:
    """The variables `names` (rank and number of ranks first) as numbers.

    ValueError where one of them or of those `beside` is missing, or the rank is none of the ranks.
    """
    wanted = (*names, *beside)
    present = [name for name in wanted if name in environment]
    missing = [name for name in wanted if name not in environment]
    if missing:
        raise ValueError(
            f"environment: {', '.join(present)} set without {', '.join(missing)}; start with {launcher}, "
            "or unset them all for one process"
        )
    numbers = [_number(name, environment) for name in names]
    if numbers[0] >= numbers[1]:
        raise ValueError(
            f"environment: {names[0]} is {numbers[0]} and {names[1]} {numbers[1]}, wanted a rank from 0 to "
            f"{numbers[1] - 1}; start with {launcher}, or unset them all for one process"
        )
    return numbers


def _number(name: str, environment: Mapping[str, str]) -> int:
    if not re.fullmatch("[0-9]{1,9}", environment[name]):
        raise ValueError(f"environment: {name} is {environment[name][:40]!r}, wanted a number")
    return int(environment[name])
