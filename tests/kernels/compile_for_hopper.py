"""Compile the Triton kernels for a Hopper GPU, which needs no GPU, and print what they use as JSON lines."""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron.kernels import triton_attention, triton_attention_kernels, triton_softmax

FLOAT32 = ("lse_all", "delta_all", "scales", "nats", "peaks", "totals", "target_logits", "log_totals")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {"sample_keys": "*i64", "targets": "*i64", "firsts": "*i32", "lasts": "*i32", "stride": "i64"}
NUMBERS = {"n": "i32", "n_heads": "i32", "scale": "fp32", "keep_factor": "fp32"}


def compile_kernel(kernel: Any, dtype: str, constants: dict[str, Any], n_warps: int) -> None:
    """Compile a kernel with pointers and sizes that are multiples of 16, and print its resources."""
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        default = "*fp32" if name in FLOAT32 else dtype
        signature[name] = "constexpr" if parameter.is_constexpr else (TYPES | NUMBERS).get(name, default)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name in ("n", "stride")
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": n_warps, "num_stages": 2}
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code = built.asm["ptx"]
    with tempfile.NamedTemporaryFile() as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        resources = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", resources)
    assert stack is not None, resources
    print(
        json.dumps(
            {
                "kernel": kernel.fn.__name__,
                "dtype": dtype,
                "shared_bytes": built.metadata.shared,
                "stack_bytes": int(stack[1]),
                "is_vectorized": "ld.global.v4" in code and "st.global.v4" in code,
                "uses_tensor_cores": "wgmma" in code or "mma.sync" in code,
            }
        ),
        flush=True,
    )


def main() -> None:
    """Compile the kernels of the loss, and those of attention for heads of 64 and 128 channels."""
    loss = {"n_columns": 50304, "block": triton_softmax.BLOCK, "has_scale": True}
    for kernel in (
        triton_softmax._nll_gradient_kernel,
        triton_softmax._gradient_kernel,
        triton_softmax._reduce_kernel,
    ):
        names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
        compile_kernel(kernel, "*bf16", {name: loss[name] for name in names}, triton_softmax.N_WARPS)
    for channels, dtype in ((128, torch.bfloat16), (64, torch.float32), (128, torch.float32)):
        compile_attention(torch.empty(1, 1, 16, channels, dtype=dtype))


def compile_attention(q: torch.Tensor) -> None:
    """Compile the kernels of attention for queries of a width and type."""
    bounds = torch.zeros(1, 16, dtype=torch.int32)
    for kernel in (
        triton_attention_kernels.forward_kernel,
        triton_attention_kernels.query_gradient_kernel,
        triton_attention_kernels.key_gradient_kernel,
    ):
        blocks = triton_attention._choose_blocks(q, backward="gradient" in kernel.fn.__name__)
        common = triton_attention._common_arguments(q, bounds, bounds, True, 0.1, 0.1, blocks)
        names = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
        constants = {name: common[name] for name in names}
        pointer = "*fp32" if q.dtype == torch.float32 else "*bf16"
        compile_kernel(kernel, pointer, constants, common["num_warps"])


if __name__ == "__main__":
    main()
