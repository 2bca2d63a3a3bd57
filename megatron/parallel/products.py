"""Which library multiplies float32 matrices on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def fastest_products() -> Iterator[None]:
    """Send float32 products to oneDNN for the length of a `with`, where torch's own choice is slow.

    torch gives them to MKL, which on AMD's processors keeps to AVX2 however wide they are: oneDNN's AVX-512
    products are twice as fast on a Zen 5. torch's only way there is "medium", which also allows oneDNN to
    multiply bfloat16 pieces; it does so with AMX alone, which AMD does not make. That the products stay those
    of float32 is tried out all the same, and where it were not so, nothing changes.
    """
    before = torch.get_float32_matmul_precision()
    if _mkl_holds_back():
        torch.set_float32_matmul_precision("medium")
        if not products_are_float32():
            torch.set_float32_matmul_precision(before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _mkl_holds_back() -> bool:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    described = Path("/proc/cpuinfo")  # Linux alone has it
    return described.exists() and "AuthenticAMD" in described.read_text()


def products_are_float32() -> bool:
    """Whether products keep all 24 bits: by the unit matrix, from both sides, each is then exact."""
    rows = torch.rand(192, 256, generator=torch.Generator().manual_seed(0))
    by_unit = (rows @ torch.eye(256), torch.eye(192) @ rows, rows.t().contiguous().t() @ torch.eye(256))
    return all(torch.equal(product, rows) for product in by_unit)
