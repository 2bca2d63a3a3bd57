"""Triton kernels on this machine: compiled where there is a GPU, otherwise interpreted on CPU tensors.

tests/conftest.py sets TRITON_INTERPRET before anything imports Triton.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _explain_missing() -> str | None:
    try:
        installed = tuple(int(part) for part in version("triton").split(".")[:2])
    except PackageNotFoundError:
        return "no triton: pip install triton"
    if DEVICE == "cpu" and installed < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        return "the interpreter of Triton below 3.7 does not support loops with numpy 2.4"
    return None


MISSING = _explain_missing()
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@dataclass
class Traffic:
    """Bytes of global memory that kernels read and wrote, masked elements excluded."""

    n_bytes: int = 0


@contextmanager
def count_bytes() -> Iterator[Traffic]:
    """Count the bytes that interpreted kernels load and store."""
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def width(pointers: Any) -> int:
        return pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        traffic.n_bytes += int(mask.data.sum()) * width(ptrs)
        return load(self, ptrs, mask, *rest)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.n_bytes += int(mask.data.sum()) * width(ptrs)
        return store(self, ptrs, value, mask, *rest)

    # loads and stores without a mask call these with a mask of ones
    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        yield traffic
