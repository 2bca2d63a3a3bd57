"""The processes of a run: ranks, devices and their process group."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from megatron.config.parallelism import ParallelLayout, RankCoordinate, build_layout
from megatron.config.schema import DistConfig
from megatron.parallel.rank_env import export_ranks, ranks_from_environment
from megatron.parallel.watchdog import Watchdog, exit_after_delay

GLOO = "gloo"
DEFAULT_TIMEOUTS = ("default_pg_timeout", "default_pg_nccl_timeout")  # variables of torch
RESOLVE_S, RETRY_S = 10.0, 0.5  # to resolve the host name of rank 0


@dataclass(frozen=True)
class World:
    """This process and its place in the run. A single process has no process group.

    dp_rank, dp_size   data-parallel rank and size; ranks
                       that share a model have the same dp_rank
    timeout            timeout of every collective; None: torch's default
    """

    rank: int
    n_ranks: int
    local_rank: int
    device: torch.device
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    timeout: timedelta | None = None

    @property
    def coordinate(self) -> RankCoordinate:
        """Coordinate of this rank in the layout."""
        return self.layout.locate_rank(self.rank)

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: the index of this rank's share of the samples."""
        return self.coordinate.data

    @property
    def dp_size(self) -> int:
        """Data-parallel size: the number of shares of the samples."""
        return self.layout.data

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which writes the shared files."""
        return self.rank == 0


@contextmanager
def open_world(config: DistConfig, n_threads: int | None = None) -> Iterator[World]:
    """Join the process group of the run for a `with` block and leave it cleanly.

    Raises ConnectionError if another rank has ended or hangs for longer than
    dist.timeout_s. The message names that rank if it can be determined.
    """
    ranks = ranks_from_environment(os.environ)
    export_ranks(ranks, os.environ)
    layout = build_layout(config, ranks.n_ranks, ranks.n_local)
    use_expandable_segments()
    on_gpu = torch.cuda.is_available() and not config.cpu_only
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    if config.backend == "nccl" and not on_gpu and not config.cpu_only:
        raise ValueError("dist.backend: got nccl without a GPU. Omit the key or set gloo.")
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", device_index(ranks.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    watchdog = None
    with _default_timeout(timeout):
        if ranks.n_ranks > 1 and ranks.address:
            resolve_host(ranks.address)
            backend = GLOO if config.backend == GLOO else backend_for(device)
            dist.init_process_group(backend, timeout=timeout)
            # after init_process_group: rank 0's
            # store accepts connections from here on
            watchdog = Watchdog(ranks, config.timeout_s)
        try:
            with nullcontext() if on_gpu else use_fastest_matmul():
                yield World(ranks.rank, ranks.n_ranks, ranks.local_rank, device, layout, timeout)
        except Exception as error:
            # an exception inside the caller's `with` block is raised at `yield`
            cause = _find_peer_error(error)
            if watchdog is not None and cause is not None:
                # the error is a consequence of another rank:
                # name that rank instead of printing a traceback
                raise ConnectionError(_explain_peer_error(cause, watchdog)) from error
            if watchdog is not None:
                # published before the process group closes: the others then name
                # this rank and its last step instead of a closed connection
                watchdog.report_exit()
            raise
        finally:
            if watchdog is not None:
                watchdog.close()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _default_timeout(timeout: timedelta) -> Iterator[None]:
    """Set torch's default timeout, for groups created without one.

    Device meshes, DeepSpeed and DCP create such groups.
    """
    before = {name: getattr(distributed_c10d, name) for name in DEFAULT_TIMEOUTS}
    # functions with `timeout=None` read these module variables at each call
    vars(distributed_c10d).update(dict.fromkeys(before, timeout))
    try:
        yield
    finally:
        vars(distributed_c10d).update(before)


def resolve_host(host: str, wait_s: float = RESOLVE_S) -> None:
    """Wait until the host name of rank 0 resolves. Raises ConnectionError if it does not within `wait_s`.

    torch would retry for dist.timeout_s without a message. On a cluster, names
    may become resolvable some seconds after a job starts.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 letters
            if time.monotonic() >= deadline:
                raise ConnectionError(
                    f"MASTER_ADDR: got {host!r}, expected the host of rank 0 ({error} for {wait_s:g} s). "
                    "Set it to a name or an address that every host of the run resolves."
                ) from error
        time.sleep(RETRY_S)


def backend_for(device: torch.device) -> str:
    """Return the backend of process groups: gloo, and nccl in addition on GPUs.

    Flags exchanged between hosts use gloo and do not synchronize the GPU.
    """
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else GLOO


def ensure_group(world: World) -> None:
    """Create a process group of one rank unless one exists: DeepSpeed and FSDP require one."""
    if not dist.is_initialized():
        dist.init_process_group(backend_for(world.device), store=HashStore(), rank=0, world_size=1)


def device_index(local_rank: int, n_visible: int) -> int:
    """Return the index of this process's GPU among the visible ones.

    Schedulers make either all GPUs of the node visible to a process, or only
    its own (srun --gpus-per-task=1).
    """
    if local_rank < n_visible:
        return local_rank
    if n_visible == 1:
        return 0
    raise ValueError(
        f"local rank {local_rank}: got {n_visible} GPUs on this node, expected one per process. "
        "Start as many processes as there are GPUs."
    )


def make_thread_init(device: torch.device) -> Callable[[], None] | None:
    """Return the function that a new thread calls first; None on a CPU.

    A new thread has CUDA device 0 as its current device and would pin memory
    for that GPU.
    """
    return partial(torch.cuda.set_device, device) if device.type == "cuda" else None


def use_expandable_segments() -> None:
    """Let CUDA's allocator grow its segments, unless the environment configures it.

    Must be called before any allocation. The head's rows differ in every step
    of masked diffusion: blocks of many sizes would fragment the memory.
    """
    # the second is the name before torch 2.10, which still has an effect
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = "expandable_segments:True"


PEER_GONE_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
TIMEOUT_ERRORS = ("Timed out waiting", "Application timeout", "Wait timeout", "collective operation timeout")


def _find_peer_error(error: BaseException) -> BaseException | None:
    """Return the error in the chain of causes that another rank has caused through a collective, or None.

    gloo's errors have no class of their own, so they
    are recognized by their text. A failed checkpoint wraps
    them in an OSError, so the whole chain is searched.
    """
    cause: BaseException | None = error
    while cause is not None:
        # an OSError "Broken pipe" is from the
        # operating system and concerns some other pipe
        texts = () if isinstance(cause, OSError) else PEER_GONE_ERRORS + TIMEOUT_ERRORS
        if isinstance(cause, dist.DistError) or any(text in str(cause) for text in texts):
            return cause
        cause = cause.__cause__
    return None


def _explain_peer_error(error: BaseException, watchdog: Watchdog) -> str:
    """Return one sentence: the rank that ended or hangs, its last position, and the collective's message."""
    message = str(error).splitlines()[0]
    is_late = any(text in str(error) for text in TIMEOUT_ERRORS)
    text = watchdog.explain_failure(is_late)
    # destroy_process_group may wait for a
    # collective that can no longer finish
    exit_after_delay()
    if is_late:
        return f"{text} (a collective has waited for dist.timeout_s={watchdog.timeout_s:g} s: {message})"
    return f"another rank is gone ({message}); {text}"


@contextmanager
def use_fastest_matmul() -> Iterator[None]:
    """Use oneDNN for float32 products inside a `with` block if torch's default library is slow.

    torch's default is MKL, which uses at most AVX2 on AMD processors: oneDNN's
    AVX-512 products are twice as fast on a Zen 5. torch selects oneDNN only
    with matmul precision "medium", which also allows oneDNN to multiply in
    bfloat16. oneDNN does that only with AMX, which no AMD processor has. The
    products are nevertheless tested, and the setting is reverted if they are
    not exact float32.
    """
    before = torch.get_float32_matmul_precision()
    if _is_mkl_slow():
        torch.set_float32_matmul_precision("medium")
        if not is_matmul_float32():
            torch.set_float32_matmul_precision(before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _is_mkl_slow() -> bool:
    cpuinfo, backends = Path("/proc/cpuinfo"), torch.backends  # the file exists on Linux only
    has_libraries = backends.mkl.is_available() and backends.mkldnn.is_available()
    is_avx512 = backends.cpu.get_cpu_capability() == "AVX512"
    return has_libraries and is_avx512 and cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()


def is_matmul_float32() -> bool:
    """Return whether products keep all 24 bits: products with the identity matrix must be exact.

    The three products occur in a linear layer: forward, and the gradients
    of input and weight.
    """
    rows = torch.rand(192, 256, generator=torch.Generator().manual_seed(0))
    # each element is a sum of one random number and zeros: exact in float32,
    # rounded to 8 bits in bfloat16. The shapes are large enough for the
    # library's blocked kernels; a tiny product could take another path.
    by_unit = (rows @ torch.eye(256), torch.eye(192) @ rows, rows.t().contiguous().t() @ torch.eye(256))
    return all(torch.equal(product, rows) for product in by_unit)
