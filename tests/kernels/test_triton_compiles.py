"""The Triton kernels compile to machine code of a Hopper GPU, on any machine."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.triton_interpreter import needs_triton

HOPPER_SHARED_BYTES = 227 * 1024
MAX_STACK_BYTES = 256  # of a thread, in local memory: registers that do not fit


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_a_hopper_and_fit_its_memory(root, tmp_path) -> None:
    """The interpreter accepts code that the compiler refuses; this is the compiler, with its assembler."""
    # not in this process, where kernels are interpreted
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = root / "tests/kernels/compile_for_hopper.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 12
    for kernel in kernels:
        assert kernel["shared_bytes"] <= HOPPER_SHARED_BYTES, kernel
        assert kernel["stack_bytes"] <= MAX_STACK_BYTES, kernel
        # only the reduction stores a number per row
        assert kernel["is_vectorized"] or kernel["kernel"] == "_reduce_kernel", kernel
    assert [kernel["uses_tensor_cores"] for kernel in kernels] == [False] * 3 + [True] * 9
