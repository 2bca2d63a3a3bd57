"""The processes of a run: ranks, devices and the group that connects them."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.config.launcher import export, ranks_from_environment
from megatron.config.layout import Coordinate, Layout, layout_of
from megatron.config.schema import DistConfig
from megatron.parallel.products import fastest_products
from megatron.parallel.watchdog import Watchdog, leave_soon

GLOO = "gloo"
RESOLVE_S, RETRY_S = 10.0, 0.5  # for the name of rank 0's host


@dataclass(frozen=True)
class World:
    """This process among all of a run. A single process has no group and needs none.

    dp_rank, dp_size   which share of the samples this rank reads; ranks that share a model read the same
    timeout            of every collective; None: torch's
    """

    rank: int
    n_ranks: int
    local_rank: int
    device: torch.device
    layout: Layout = field(default_factory=Layout)
    timeout: timedelta | None = None

    @property
    def coordinate(self) -> Coordinate:
        """Where this rank stands in the layout."""
        return self.layout.coordinate(self.rank)

    @property
    def dp_rank(self) -> int:
        """Number of this rank's share of the samples."""
        return self.coordinate.data

    @property
    def dp_size(self) -> int:
        """Into how many shares the samples are cut."""
        return self.layout.data

    @property
    def is_first(self) -> bool:
        """Rank 0 writes what all share."""
        return self.rank == 0


@contextmanager
def open_world(config: DistConfig, n_threads: int | None = None) -> Iterator[World]:
    """Join the run's processes for the length of a `with`, and leave them in order.

    Raises ConnectionError where another rank has died meanwhile, or hangs for longer than dist.timeout_s; it
    says which, as far as that is known.
    """
    ranks = ranks_from_environment(os.environ)
    rank, n_ranks, local_rank = ranks.rank, ranks.n_ranks, ranks.local_rank
    export(ranks, os.environ)
    layout = layout_of(config, n_ranks, ranks.n_local)
    on_gpu = torch.cuda.is_available() and not config.cpu_only
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    if config.backend == "nccl" and not on_gpu and not config.cpu_only:
        raise ValueError("dist.backend: nccl needs a GPU and finds none; leave the key out or set gloo")
    device = (
        torch.device("cuda", device_index(local_rank, torch.cuda.device_count()))
        if on_gpu
        else torch.device("cpu")
    )
    if on_gpu:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    watchdog = None
    with _default_timeout(timeout):
        if n_ranks > 1:
            if ranks.address is not None:
                resolve_host(ranks.address)
            backend = GLOO if config.backend == GLOO else backend_for(device)
            dist.init_process_group(backend, timeout=timeout)
            watchdog = Watchdog(ranks, config.timeout_s)
        try:
            with nullcontext() if on_gpu else fastest_products():
                yield World(rank, n_ranks, local_rank, device, layout, timeout)
        except Exception as error:
            cause = _error_of_a_peer(error)
            if watchdog is None:
                raise
            if cause is None:
                watchdog.leave_with_error()
                raise
            text = _explain_loss(cause, watchdog)
            leave_soon()
            raise ConnectionError(text) from error
        finally:
            if watchdog is not None:
                watchdog.close()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _default_timeout(timeout: timedelta) -> Iterator[None]:
    """What groups get that are made without a time of their own: of device meshes, DeepSpeed and DCP."""
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    before = {name: getattr(distributed_c10d, name) for name in names if hasattr(distributed_c10d, name)}
    for name in before:
        setattr(distributed_c10d, name, timeout)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(distributed_c10d, name, value)


def resolve_host(host: str, wait_s: float = RESOLVE_S) -> None:
    """Wait until the name of rank 0's host has an address. ConnectionError where it has none for `wait_s`.

    torch retries such a name for dist.timeout_s without a word. A cluster's names may come some seconds after
    a job's start; a lookup may itself take long, and is waited for in a thread.
    """
    reasons: list[str] = []
    found = threading.Event()

    def look_up() -> None:
        while not gone.is_set():
            try:
                socket.getaddrinfo(host, None)
            except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 letters
                reasons.append(str(error))
                gone.wait(RETRY_S)
            else:
                found.set()
                return

    gone = threading.Event()
    threading.Thread(target=look_up, daemon=True).start()
    resolved = found.wait(wait_s)
    gone.set()
    if not resolved:
        reason = reasons[-1] if reasons else "no answer"
        raise ConnectionError(
            f"MASTER_ADDR: got {host!r}, expected the host of rank 0 ({reason} for {wait_s:g} s). Set it to "
            "a name or an address that every host of the run resolves."
        )


def backend_for(device: torch.device) -> str:
    """Of process groups: gloo, on GPUs nccl beside it, so that decisions of the hosts keep no GPU waiting."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else GLOO


def ensure_group(world: World) -> None:
    """Make a process group of one rank where there is none: DeepSpeed and FSDP want one even then."""
    if not dist.is_initialized():
        dist.init_process_group(backend_for(world.device), store=dist.HashStore(), rank=0, world_size=1)


def device_index(local_rank: int, n_visible: int) -> int:
    """Which of the GPUs that this process sees is its own.

    Schedulers either show a process all GPUs of the node, or its own alone (srun --gpus-per-task=1).
    """
    if local_rank < n_visible:
        return local_rank
    if n_visible == 1:
        return 0
    raise ValueError(
        f"local rank {local_rank} finds {n_visible} GPUs on this node, wanted one for each process; "
        "start as many processes as there are GPUs"
    )


GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
LATE = ("Timed out waiting", "Application timeout", "Wait timeout", "collective operation timeout")


def _error_of_a_peer(error: BaseException) -> BaseException | None:
    """The error, or one that caused it, of a collective that failed because of another rank.

    gloo's errors have no class of their own, and a checkpoint that is not written hides them in an OSError.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError):
            return cause
        # the system's own "Broken pipe" is an OSError, and of another pipe
        if not isinstance(cause, OSError) and any(text in str(cause) for text in GONE + LATE):
            return cause
        cause = cause.__cause__
    return None


def _explain_loss(error: BaseException, watchdog: Watchdog) -> str:
    """One sentence: which rank is gone or hangs, where it was, and what the collective said."""
    said = str(error).splitlines()[0]
    is_late = any(text in str(error) for text in LATE)
    text = watchdog.explain(is_late)
    if is_late:
        return f"{text} (a collective has waited for dist.timeout_s={watchdog.timeout_s:g} s: {said})"
    return f"another rank is gone ({said}); {text}"
