"""Ranks from the environment variables of each launcher, as the launchers really set them."""

import pytest

from megatron.parallel.rank_env import (
    FIRST_PORT,
    N_PORTS,
    Ranks,
    export_ranks,
    parse_first_host,
    ranks_from_environment,
)
from megatron.study.launchers.local import LAUNCHER_VARIABLE


def parse_env(line: str) -> dict[str, str]:
    """Return the variables of a line such as "RANK=0 WORLD_SIZE=2"."""
    return dict(word.split("=") for word in line.split())


TORCHRUN = parse_env("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29400")
SRUN = parse_env(
    "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 "
    "SLURM_JOB_NODELIST=gpu[012-013]"
)
OPEN_MPI = parse_env(
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=2 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=1234 PMIX_RANK=2"
)
MVAPICH = parse_env(
    "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2"
)
PALS = parse_env("PALS_RANKID=9 PMI_RANK=9 PMI_SIZE=12 PALS_LOCAL_RANKID=3 PALS_LOCAL_SIZE=6 MASTER_ADDR=x1")
HYDRA = parse_env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
CRAY = parse_env("PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=0 PMI_LOCAL_SIZE=1 MASTER_ADDR=n1")


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, (0, 1, 0, None)),
        ({"MASTER_ADDR": "site-wide", "LOCAL_RANK": "0"}, (0, 1, 0, None)),
        (TORCHRUN, (3, 8, 1, "node0")),
        (SRUN, (5, 8, 1, "gpu012")),
        (OPEN_MPI, (2, 4, 2, "127.0.0.1")),
        (MVAPICH, (1, 2, 1, "127.0.0.1")),
        (PALS, (9, 12, 3, "x1")),
        (HYDRA, (1, 2, 1, "127.0.0.1")),
        (CRAY, (1, 2, 0, "n1")),
        # torchrun under srun: Slurm starts one task per node
        (SRUN | TORCHRUN, (3, 8, 1, "node0")),
        # mpirun inside a Slurm job starts one daemon per node with srun, and the daemons start the ranks
        (SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (2, 4, 2, "gpu012")),
        # srun with its own PMI
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, (5, 8, 1, "gpu012")),
        ({**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (0, 1, 0, None)),
        # the batch script of a job with one task
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}, (0, 1, 0, None)),
    ],
)
def test_ranks_are_found_from_every_launcher(environment: dict[str, str], ranks: tuple) -> None:
    result = ranks_from_environment(environment)
    assert (result.rank, result.n_ranks, result.local_rank, result.address) == ranks


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_PORT, MASTER_ADDR; start with torchrun"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, "without SLURM_LOCALID; start with srun"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "without OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK, PMI_SIZE set without PMI_LOCAL_RANK"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "set MASTER_ADDR to the first host"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "this process is its batch script; start with srun"),
        (TORCHRUN | {"RANK": "one"}, "RANK is 'one', expected a number"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8 and WORLD_SIZE 8, expected a rank from 0 to 7"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "all"}, "LOCAL_WORLD_SIZE is 'all', expected a number"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK set without RANK, WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE set without OMPI_COMM_WORLD_RANK"),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "1"}, "set without MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE set without"),
        (SRUN | {"MASTER_PORT": "any"}, "MASTER_PORT is 'any', expected a number"),
        ({"SLURM_NTASKS": "two", "SLURM_PROCID": "0"}, "SLURM_NTASKS is 'two', expected a number"),
    ],
)
def test_incomplete_variables_are_refused(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        ranks_from_environment(environment)
    assert sentence in str(caught.value)


def test_ranks_on_a_host_are_counted_from_slurms_list() -> None:
    for tasks, node, n_local in (("8(x2)", "1", 8), ("8(x2),4", "2", 4), ("3,5(x3)", "1", 5)):
        variables = SRUN | {"SLURM_NTASKS": "20", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
        ranks = ranks_from_environment(variables)
        assert ranks.n_local == n_local
        environment: dict[str, str] = {}
        export_ranks(ranks, environment)
        assert environment["LOCAL_WORLD_SIZE"] == environment["LOCAL_SIZE"] == str(n_local)
    # tasks on a single node use the loopback address
    assert ranks_from_environment(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8"}).address == "127.0.0.1"


def test_the_first_host_of_a_list() -> None:
    for hosts, first in (
        ("node7", "node7"), ("node7,node9", "node7"), ("n[03-05,9],gpu1", "n03"), ("n[5,7-9]", "n5"),
        ("rack[1-2]n[10-12]-ib,x", "rack1n10-ib"),
    ):  # fmt: skip
        assert parse_first_host(hosts) == first


def test_ranks_of_one_job_agree_on_a_port_and_jobs_differ() -> None:
    ports = {ranks_from_environment({**SRUN, "SLURM_PROCID": str(rank)}).port for rank in range(8)}
    other = ranks_from_environment({**SRUN, "SLURM_JOB_ID": "78"}).port
    assert len(ports) == 1
    assert ports != {other}
    assert FIRST_PORT <= min(ports) < FIRST_PORT + N_PORTS
    assert ranks_from_environment({**SRUN, "MASTER_PORT": "555"}).port == 555


def test_exported_variables_read_back() -> None:
    environment = dict(SRUN)
    ranks = ranks_from_environment(environment)
    export_ranks(ranks, environment)
    assert ranks_from_environment(environment) == ranks
    for variables in (SRUN, OPEN_MPI, MVAPICH, PALS, HYDRA, CRAY, TORCHRUN):
        child = {name: value for name, value in variables.items() if not LAUNCHER_VARIABLE.fullmatch(name)}
        assert ranks_from_environment(child) == Ranks()
    assert not any(map(LAUNCHER_VARIABLE.fullmatch, ("SLURM_JOB_ID", "MPI_HOME", "PATH", "RANKS", "PMIX")))


@pytest.mark.parametrize("word", ["9" * 5000, "\u0663", "-1", "1.0", "", "+1", "1_0"])
def test_an_invalid_number_of_ranks_is_named(word: str) -> None:
    with pytest.raises(ValueError, match="environment: WORLD_SIZE is .*, expected a number"):
        ranks_from_environment(TORCHRUN | {"WORLD_SIZE": word})
