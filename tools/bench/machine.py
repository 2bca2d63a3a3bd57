"""What a timing on a CPU states beside its seconds: instruction set, its limits, rate of products."""

import os
import time
from collections.abc import Sequence

import torch

LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def describe_machine() -> str:
    """torch's version, its kernels' instruction set, and the limits that the environment sets."""
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {' '.join(limits) or 'no limits set'}"


def gemm_rate(size: int = 512, repeats: int = 20) -> float:
    """FLOP/s of square float32 products on torch's threads, by the clock; the best of several."""
    left, right = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best


def lower_quartile(seconds: Sequence[float]) -> float:
    """Of several timings of the same work, on a machine that does other work too."""
    return sorted(seconds)[len(seconds) // 4]
