"""Choice of the library for float32 matrix products on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def use_fastest_matmul() -> Iterator[None]:
    """Use oneDNN for float32 products inside a `with` block if torch's default library is slow.

    torch's default is MKL, which uses at most AVX2 on AMD processors: oneDNN's AVX-512 products are twice as
    fast on a Zen 5. torch selects oneDNN only with matmul precision "medium", which also allows oneDNN to
    multiply in bfloat16. oneDNN does that only with AMX, which no AMD processor has. The products are
    nevertheless tested, and the setting is reverted if they are not exact float32.
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
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    cpuinfo = Path("/proc/cpuinfo")  # exists on Linux only
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()


def is_matmul_float32() -> bool:
    """Return whether products keep all 24 bits: products with the identity matrix must be exact.

    The three products are those of a linear layer: forward, and the gradients of input and weight.
    """
    rows = torch.rand(192, 256, generator=torch.Generator().manual_seed(0))
    # each element is a sum of one random number and zeros: exact in float32,
    # rounded to 8 bits in bfloat16. The shapes are large enough for the
    # library's blocked kernels; a tiny product could take another path.
    by_unit = (rows @ torch.eye(256), torch.eye(192) @ rows, rows.t().contiguous().t() @ torch.eye(256))
    return all(torch.equal(product, rows) for product in by_unit)
