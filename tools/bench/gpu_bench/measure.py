"""Measurement of one cell: seconds of each step, kernels, memory and CUDA graphs."""

import argparse
import platform
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_bench import cells
from megatron.plan.count import flops_per_token_executed, flops_per_token_mfu, n_params
from megatron.plan.hardware import find_device

WARMUP = 12
TOP_KERNELS = 8
# Part of a kernel's name -> backend of attention. The first that fits: cuDNN's names contain "flash" as well.
ATTENTION_KERNELS = (("cudnn", "cudnn"), ("fmha", "efficient"), ("flash", "flash"))


def measure_cell(cell: cells.Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell in this process.

    Raises SkippedCellError with a reason, and RuntimeError for a cell without its graphs or attention.
    """
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    cells.free_memory(device)
    with cells.use_kernels(cell, device, args.seq_len) as choice:
        began = time.perf_counter()
        step = cells.build_step(cell, device, args.seq_len, args.accumulate)
        for i in range(min(WARMUP, args.steps)):
            loss = step(i)
        first_loss = float(loss)  # waits: compilation ends before the timed steps begin
        startup_s = time.perf_counter() - began
        if device.type == "cuda":
            if cell.expects_graph:
                torch.cuda.empty_cache()  # blocks of the runs before the recording, which are not used again
            torch.cuda.reset_peak_memory_stats()
        n_before = count_replays(step)
        step_s = time_steps(step, args.steps, device)
        n_replays = count_replays(step) - n_before
        memory = read_memory(device, cell.expects_graph)
        times = profile_kernels(step, device)
    if device.type == "cuda":
        check_run(cell, n_replays, times)
    attention = cell.attention or (None if choice is None else choice.name)
    return {
        "cell": cell.name,
        **compute_speed(cell, args, device, step_s),
        **memory,
        "startup_s": startup_s,
        "loss": first_loss,
        "kernels": list_top_kernels(times),
        "kernels_per_step": sum(n for _, n in times.values()),
        "attention_kernels": find_attention(times),
        "graph_replays": n_replays,
        "settings": {
            **cells.choose_dist(cell, device),
            "attention": attention,
            "attention_choice": None if choice is None else choice.as_dict(),
            "rows": cell.rows,
            "steps": args.steps,
        },
    }


def compute_speed(
    cell: cells.Cell, args: argparse.Namespace, device: torch.device, step_s: Sequence[float]
) -> dict[str, Any]:
    """Return the part of a record that follows from the seconds of each step."""
    model = cells.make_model(cell.size)
    tokens = cell.rows * args.seq_len * args.accumulate
    rate = tokens / median(step_s)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    record = {
        "value": rate,
        "unit": "tokens/s",
        "better": "higher",
        "repeats": [tokens / seconds for seconds in step_s],
        "step_ms": 1e3 * median(step_s),
        "tflops": rate * flops_per_token_mfu(model, args.seq_len) / 1e12,
        "n_params": n_params(model),
        "tokens_per_step": tokens,
        "hardware": name,
        "torch": torch.__version__,
    }
    hardware = find_device(name)
    if hardware is not None:
        causal = cell.objective == cells.AR
        executed = flops_per_token_executed(model, args.seq_len, causal, 1.0 if causal else 0.5)
        peak = hardware.peak_tflops * 1e12
        record["mfu"] = record["tflops"] * 1e12 / peak
        record["mfu_executed"] = rate * executed / peak
    return record


def read_memory(device: torch.device, has_graph: bool) -> dict[str, Any]:
    """Return the peak of the memory since its reset, and which peak it is.

    The activations of a graph are in its own pool. The allocator counts them as allocated only during the
    recording, which precedes the reset, but as reserved always.
    """
    if device.type != "cuda":
        return {"memory_gib": None, "memory_kind": None, "reserved_gib": None}
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {
        "memory_gib": (reserved if has_graph else allocated) / 2**30,
        "memory_kind": "reserved" if has_graph else "allocated",
        "reserved_gib": reserved / 2**30,
    }


def count_replays(step: cells.Step) -> int:
    """Return the number of CUDA graphs that a step has replayed; 0 for steps without graphs."""
    return step.count_replays() if isinstance(step, cells.EngineStep) else 0


def check_run(cell: cells.Cell, n_replays: int, kernels: Iterable[str]) -> None:
    """Raise RuntimeError if a cell ran without its CUDA graphs or with another attention kernel."""
    if cell.expects_graph and n_replays == 0:
        raise RuntimeError(f"{cell.name}: got no replay of a CUDA graph in the timed steps.")
    backends = find_attention(kernels)
    if cell.attention is not None and backends != [cell.attention]:
        names = ", ".join(backends) or "none"
        raise RuntimeError(f"{cell.name}: got attention kernels of {names}, expected {cell.attention}.")


def find_attention(kernels: Iterable[str]) -> list[str]:
    """Return the backends of attention whose kernels are in a list of names, sorted."""
    backends = set()
    for name in kernels:
        lower = name.lower()
        # Inductor's kernels are named after the operators around them, attention included
        if not lower.startswith("triton_"):
            backends.update([backend for part, backend in ATTENTION_KERNELS if part in lower][:1])
    return sorted(backends)


def median(values: Sequence[float]) -> float:
    """Return the middle value; of an even number the upper one of the two."""
    return sorted(values)[len(values) // 2]


def time_steps(step: Any, n_steps: int, device: Any) -> list[float]:
    """Return the seconds of each step: by events on a GPU, by the host's clock on a CPU."""
    if device.type != "cuda":
        seconds = []
        for i in range(n_steps):
            began = time.perf_counter()
            step(i)
            seconds.append(time.perf_counter() - began)
        return seconds
    # The host runs ahead: nothing in the loop waits for the device. Differences of consecutive events include
    # every gap in which the device has no work.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(n_steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for i in range(n_steps):
        step(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]


def profile_kernels(step: Any, device: Any, n_steps: int = 3) -> dict[str, tuple[float, float]]:
    """Return (microseconds, launches) of a step for each kernel by name; on a CPU for each operator."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    n_steps = n_steps if on_gpu else 1
    with profile(activities=activities) as profiler:
        for i in range(n_steps):
            step(i)
        if on_gpu:
            torch.cuda.synchronize()
    times: dict[str, tuple[float, float]] = {}
    for event in profiler.key_averages():
        # on a GPU only events of the device itself, not the operators that launched them
        if on_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if getattr(event, "is_user_annotation", False):
            continue  # a range around kernels that are listed themselves
        us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        times[event.key] = (us / n_steps, event.count / n_steps)
    return times


def list_top_kernels(times: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    """Return the kernels with the most time, as shares of all."""
    whole = sum(us for us, _ in times.values()) or 1.0
    top = sorted(times.items(), key=lambda item: -item[1][0])[:TOP_KERNELS]
    return [{"name": name[:96], "share": us / whole, "calls": n} for name, (us, n) in top]
