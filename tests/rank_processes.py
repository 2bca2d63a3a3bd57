"""Ranks of a program, forked from a server that has imported torch: a start takes milliseconds."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron.cli import run_main
from tests.conftest import free_port
from tests.tool_modules import TOOLS, CliResult, load_tool

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.rank_server"])
LIMIT_S = 240
Program = Callable[..., None]


@dataclass(frozen=True)
class Rank:
    """A started process; its output goes to files."""

    process: BaseProcess
    output: Path
    error: Path

    @property
    def is_running(self) -> bool:
        return self.process.is_alive()

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None, "it is started"
        os.kill(self.process.pid, number)

    def wait(self, timeout_s: float = LIMIT_S) -> CliResult:
        """Wait for the end; the status is minus the signal's number for a killed process."""
        self.process.join(timeout_s)
        result = CliResult(self.process.exitcode or 0, self.output.read_text(), self.error.read_text())
        assert self.process.exitcode is not None, f"no end within {timeout_s} s: {result}"
        return result

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        """Wait until a condition is true; the process must not end before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline and self.is_running, self.wait(1)
            time.sleep(0.002)


def start_ranks(program: Program, *args: Any, n_ranks: int, folder: Path) -> list[Rank]:
    """Run a function of a module on new gloo ranks with torchrun's variables; logs are in `folder`."""
    shared = dict(os.environ)
    if n_ranks > 1:
        shared |= {"WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n_ranks):
        variables = {"RANK": str(number), "LOCAL_RANK": str(number)} if n_ranks > 1 else {}
        stem = f"{time.monotonic_ns()}-{number}"
        output, error = folder / f"{stem}.out", folder / f"{stem}.err"
        process = SERVER.Process(target=run_rank, args=(program, args, shared | variables, output, error))
        process.start()
        ranks.append(Rank(process, output, error))
    return ranks


def run_rank(
    program: Program, args: tuple[Any, ...], environment: dict[str, str], output: Path, error: Path
) -> None:
    """Run a function in a forked process with an environment and standard streams."""
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, output), (2, error)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    program(*args)


def stop_ranks(ranks: list[Rank]) -> None:
    """Kill what still runs."""
    for rank in ranks:
        if rank.is_running:
            rank.send_signal(signal.SIGKILL)
        rank.process.join()


def run_tool(name: str, words: list[str], change: Callable[[], None] | None = None) -> None:
    """Run a file of tools/ to the end of the process; `change` patches the process before."""
    if change is not None:
        change()
    tool = load_tool(TOOLS / name)
    sys.argv = [str(TOOLS / name), *words]
    if name == "pretrain.py":
        tool.exit_process(tool.main())
    run_main(tool.main)


def read_timeouts() -> list[float]:
    """Return the timeout in seconds of each process group of this rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    groups = [group for group in distributed_c10d._world.pg_map if group != dist.GroupMember.NON_GROUP_MEMBER]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]
