"""Optimizer steps from static buffers, recorded as CUDA graphs: a replay costs the host one call.

Launching the few hundred kernels of a small model takes longer than running them. A CUDA graph repeats
recorded kernels with the same addresses, so everything that changes between steps is a tensor: the batch, the
learning rate, the step count, the divisor of the gradients. One graph is recorded for the forward and
backward of a microbatch of each shape, and one for the update.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.log import get_logger
from megatron.objective.task import ModelKwargs, Task
from megatron.parallel.world import World
from megatron.plan.count import n_params

MAX_PARAMETERS = 150e6  # of a model whose steps are recorded by default: larger ones keep a GPU busy anyway
# Numbers of predicted rows are padded to one of these many sizes, in multiples of 128 rows as in the tiles of
# matrix products. Each size is recorded once; on average half a size of rows is computed for nothing.
N_ROW_SIZES, ROW_MULTIPLE = 8, 128
WARMUP_RUNS = 2  # unrecorded runs of a function, in which libraries allocate workspaces and choose algorithms

log = get_logger(__name__)


def find_graph_obstacle(dist: DistConfig, model: ModelConfig, optim: OptimConfig, world: World) -> str | None:
    """Return the reason why steps cannot or should not be recorded as CUDA graphs; None if they are."""
    if dist.cuda_graphs is False:
        return "dist.cuda_graphs=false"
    if world.device.type != "cuda":
        return "the device is not a GPU"
    if dist.engine != "torch":
        return f"dist.engine={dist.engine}"
    if world.n_ranks > 1:
        return "the run has several ranks, which exchange data within a step"
    if dist.cpu_offload:
        return "dist.cpu_offload updates the weights on the CPU"
    if dist.float8:
        return "dist.float8 is not tried with it"
    if optim.kernel != "torch":
        return f"optim.kernel={optim.kernel} reads the gradient norm on the host"
    if dist.cuda_graphs is None and n_params(model) > MAX_PARAMETERS:
        return f"the model has more than {MAX_PARAMETERS / 1e6:.0f}M parameters"
    return None


def choose_static_step(dist: DistConfig, model: ModelConfig, optim: OptimConfig, world: World) -> bool:
    """Return whether to record steps, and log why not.

    Raises ValueError if dist.cuda_graphs is true, but cannot be.
    """
    obstacle = find_graph_obstacle(dist, model, optim, world)
    if obstacle is None:
        return True
    if dist.cuda_graphs:
        raise ValueError(f"dist.cuda_graphs: got true, but {obstacle}. Set it to auto or false.")
    if world.device.type == "cuda" and world.is_first:
        log.info("dist.cuda_graphs: steps are not recorded: %s", obstacle)
    return False


def pad_row_count(n_rows: int, n_positions: int) -> int:
    """Return the number of predicted rows with padding, for `n_rows` of the B * S = `n_positions`."""
    unit = -(-n_positions // (N_ROW_SIZES * ROW_MULTIPLE)) * ROW_MULTIPLE
    # 16 samples of 2,048: 4,096 rows more per size. 5,000 rows become 8,192.
    return max(1, -(-n_rows // unit)) * unit


def capture_graph(
    function: Callable[[], None], pool: Any, stream: torch.cuda.Stream | None
) -> torch.cuda.CUDAGraph:
    """Return a graph of the kernels that a function launches, without running them.

    Raises RuntimeError with the function's error; the caller's stream and ordinary memory are then in use.
    """
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream()
    cause: Exception | None = None
    try:
        # thread_local: threads that prefetch batches pin memory meanwhile, which a global capture forbids
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                function()
            except Exception as error:
                cause = error
                raise
    except Exception as error:
        # Ending an invalid capture raises as well: its message hides the cause, the stream of the capture
        # stays current, and up to torch 2.11 allocations stay in the pool.
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # torch has ended it already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        cause = cause or error
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause
    return graph


class StaticStep:
    """Steps on buffers that keep their addresses.

    accumulate   adds a task's gradient, times a float64 scalar, to `.grad`; returns its nats, float64 scalar
    update       updates the weights from `.grad`; returns the gradient norm, float32 scalar
    retain       returns what a graph of a task reads and others may free, such as cached tables
    required     whether a failure to record is an error; otherwise the steps then run unrecorded
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        *,
        accumulate: Callable[[Task, Tensor], Tensor],
        update: Callable[[], Tensor],
        retain: Callable[[Task], object],
        record: bool,
        required: bool = False,
    ) -> None:
        """Allocate gradients of zero. `record` False: the same functions run each time, also on a CPU."""
        self.accumulate, self.update, self.retain = accumulate, update, retain
        self.record, self.required = record, required
        self.gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.share = torch.zeros((), dtype=torch.float64, device=device)
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.norm = torch.zeros((), dtype=torch.float32, device=device)
        self.tasks: dict[Hashable, Task] = {}
        self.n_runs: Counter[Hashable] = Counter()
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.retained: list[object] = []
        self.stream = torch.cuda.Stream(device) if record else None
        # one pool for all graphs: they never run at the same time, and no tensor of theirs outlives a replay
        self.pool = torch.cuda.graph_pool_handle() if record else None

    def run(self, tasks: Sequence[Task], share: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step on tasks in pinned memory; return (nats, gradient norm) as new tensors.

        The gradient is that of share * nats. The caller has set the learning rate.
        """
        self.share.copy_(share)
        self.total.zero_()
        for task in tasks:
            key, static = self._load_task(task)
            self._play(key, partial(self._accumulate, static), static)
        self._play("update", self._update, None)
        return self.total.clone(), self.norm.clone()

    def _accumulate(self, task: Task) -> None:
        self.total += self.accumulate(task, self.share)

    def _update(self) -> None:
        self.norm.copy_(self.update())
        # zeroed and not freed: the next step adds to the same memory
        torch._foreach_zero_(self.gradients)

    def _load_task(self, task: Task) -> tuple[Hashable, Task]:
        """Copy a task into the buffers of its shape; return the shape and the buffers."""
        kwargs = cast(dict[str, Tensor], task.model_kwargs)
        n = len(task.targets)
        size = n if task.positions is None else pad_row_count(n, task.inputs.numel())
        key = (task.inputs.shape, size, task.positions is None, task.scale is None, *sorted(kwargs))
        if key not in self.tasks:
            self.tasks[key] = self._allocate_task(task, size)
        static = self.tasks[key]
        static.inputs.copy_(task.inputs, non_blocking=True)
        for name, tensor in cast(dict[str, Tensor], static.model_kwargs).items():
            tensor.copy_(kwargs[name], non_blocking=True)
        pairs = (
            (static.positions, task.positions),
            (static.targets, task.targets),
            (static.scale, task.scale),
        )
        for buffer, rows in pairs:
            if buffer is not None and rows is not None:
                buffer[:n].copy_(rows, non_blocking=True)
                # padding: row 0, token 0 and scale 0, whose loss and gradient are 0
                buffer[n:].zero_()
        return key, static

    def _allocate_task(self, task: Task, size: int) -> Task:
        device = self.share.device
        padded = task.positions is not None

        def allocate(n: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(n, dtype=dtype, device=device)

        kwargs = {
            name: torch.empty_like(tensor, device=device)
            for name, tensor in cast(dict[str, Tensor], task.model_kwargs).items()
        }
        assert task.scale is not None or not padded, "padding has scale 0"
        return Task(
            inputs=torch.empty_like(task.inputs, device=device),
            positions=allocate(size, torch.int64) if padded else None,
            targets=allocate(size, torch.int64),
            scale=None if task.scale is None else allocate(size, torch.float32),
            count=task.count,
            model_kwargs=cast(ModelKwargs, kwargs),
        )

    def _play(self, key: Hashable, function: Callable[[], None], task: Task | None) -> None:
        """Run a function of static buffers: the first times as it is, then once recorded, then by replay."""
        if self.record and key not in self.graphs and self.n_runs[key] >= WARMUP_RUNS:
            self._record(key, function, task)
        if key in self.graphs:
            self.graphs[key].replay()
            return
        self.n_runs[key] += 1
        if not self.record:
            function()
            return
        # on the stream of the recording, where nodes of autograd and workspaces of libraries then belong
        assert self.stream is not None, "created for recording"
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function()
        torch.cuda.current_stream().wait_stream(self.stream)

    def _record(self, key: Hashable, function: Callable[[], None], task: Task | None) -> None:
        """Record a function without running it."""
        if task is not None:
            self.retained.append(self.retain(task))
        try:
            self.graphs[key] = capture_graph(function, self.pool, self.stream)
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0]
            if self.required:
                raise ValueError(
                    f"dist.cuda_graphs: got true, but recording failed ({reason}). Set it to auto or false."
                ) from error
            log.warning("dist.cuda_graphs: recording failed (%s); the steps run unrecorded", reason)
            self.record = False
            self.graphs.clear()
