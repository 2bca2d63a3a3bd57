"""The kernel of scaled dot product attention on a GPU: chosen by a measurement, the same for a whole run.

torch chooses from the device and the versions of torch and cuDNN, silently: on a Hopper GPU an older cuDNN
means FlashAttention 2 instead of cuDNN's kernel. Here the candidates are timed once per shape, and the chosen
one is first in torch's order for this process. Others remain behind it for shapes that it does not support.
"""

import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

# name -> (torch's backend, implementation of flash attention that replaces torch's or None)
BACKENDS: dict[str, tuple[SDPBackend, str | None]] = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, None),
    "flash": (SDPBackend.FLASH_ATTENTION, None),
    "flash3": (SDPBackend.FLASH_ATTENTION, "FA3"),
    "flash4": (SDPBackend.FLASH_ATTENTION, "FA4"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, None),
    "math": (SDPBackend.MATH, None),
}
SHARES_HEADS = ("cudnn", "flash", "flash3", "flash4")  # read a shared key and value head without a copy
HOPPER = (9, 0)
CUDNN_FOR_HOPPER = 91500  # torch 2.10 prefers cuDNN on Hopper above this version
WARM_UP, TIMED, CALLS = 3, 5, 5  # unmeasured calls of a candidate, measurements, and calls of each
# Cycles that a GPU waits before a measurement, 2 to 3 ms: meanwhile the host launches all calls of it. A
# short sequence takes the host longer to launch than the GPU to compute.
LAUNCH_CYCLES = 5_000_000

_active: list[str] = []  # name of the backend that `use_attention_backend` made the first, if any
_contexts = ExitStack()


@dataclass(frozen=True)
class AttentionShape:
    """The calls to choose a backend for."""

    n_samples: int
    n_heads: int
    n_kv_heads: int
    n_positions: int
    d_head: int
    causal: bool


@dataclass(frozen=True)
class AttentionChoice:
    """A backend with its evidence.

    milliseconds   forward and backward of one call for each candidate that ran; empty if none was measured
    """

    name: str
    reason: str
    milliseconds: dict[str, float]
    warning: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `attention` in result.json."""
        return asdict(self)

    def describe(self) -> str:
        """Return one line for the log."""
        times = ", ".join(f"{name} {ms:.3f} ms" for name, ms in self.milliseconds.items())
        return f"attention: {self.name} ({self.reason}{': ' + times if times else ''})"


def choose_attention_backend(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, requested: str = "auto"
) -> AttentionChoice:
    """Return the fastest backend for a shape on a GPU, or the requested one; on a CPU there is no choice.

    Results are cached for the process. Raises ValueError if the requested backend does not run.
    """
    if device.type != "cuda":
        return AttentionChoice("cpu", "this project's and torch's CPU kernels, by shape", {})
    return _choose_on_gpu(shape, dtype, device, requested)


@cache
def _choose_on_gpu(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, requested: str
) -> AttentionChoice:
    capability = torch.cuda.get_device_capability(device)
    cudnn = torch.backends.cudnn.version() or 0

    def measure(name: str) -> float:
        return measure_backend(name, shape, dtype, device)

    choice = pick_backend(requested, measure)
    warning = explain_slow_backend(choice.name, capability, cudnn, dtype)
    return AttentionChoice(choice.name, choice.reason, choice.milliseconds, warning)


def pick_backend(requested: str, measure: Callable[[str], float]) -> AttentionChoice:
    """Return the fastest candidate, or the requested one.

    measure   name -> milliseconds; raises an exception where a backend does not run

    Raises the errors of CUDA itself, after which the process can run no kernel.
    """
    if requested != "auto":
        try:
            return AttentionChoice(requested, "dist.attention_backend", {requested: measure(requested)})
        except Exception as error:  # FlashAttention 3 and 4 are other packages with errors of their own
            _raise_if_permanent(error)
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"dist.attention_backend: got {requested}, which does not run here ({cause}). "
                "Remove the key, or install what the backend requires."
            ) from error
    milliseconds: dict[str, float] = {}
    for name in BACKENDS:
        if name == "math" and milliseconds:
            continue  # B x H x S x S scores: only where nothing else runs
        try:
            milliseconds[name] = measure(name)
        except Exception as error:  # not in this build, or not for this shape or dtype
            _raise_if_permanent(error)
    if not milliseconds:
        raise ValueError("dist.attention_backend: no backend runs for this shape. Set dist.dtype=bfloat16.")
    fastest = min(milliseconds, key=lambda name: milliseconds[name])
    return AttentionChoice(fastest, "fastest measured", milliseconds)


def _raise_if_permanent(error: Exception) -> None:
    """Raise an error of CUDA again: all further calls of the process would fail with it."""
    # a library that was built for other GPUs has no kernel for this one, which affects no other call
    if "CUDA error" in str(error) and "no kernel image" not in str(error):
        raise error


def explain_slow_backend(
    name: str, capability: tuple[int, int], cudnn: int, dtype: torch.dtype
) -> str | None:
    """Return a warning if a Hopper GPU runs an attention kernel of older GPUs, with the probable cause."""
    if capability != HOPPER or name in ("cudnn", "flash3", "flash4"):
        return None
    if dtype == torch.float32:
        return (
            f"attention: {name} on a Hopper GPU, since dist.dtype is float32. Set it to bfloat16 for speed."
        )
    cause = "cuDNN or FlashAttention 3 was slower or did not run"
    if cudnn <= CUDNN_FOR_HOPPER:
        cause = f"cuDNN is {cudnn}, and torch prefers it on Hopper above {CUDNN_FOR_HOPPER}"
    return (
        f"attention: {name}, a kernel for GPUs before Hopper ({cause}). Install torch for CUDA 13, remove "
        "other cuDNN libraries from LD_LIBRARY_PATH, or install flash-attn-4."
    )


def measure_backend(name: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> float:
    """Return the milliseconds of forward and backward with a backend: the median of several calls.

    Raises an exception, often RuntimeError, ImportError or ValueError, where it does not run.
    """
    backend, implementation = BACKENDS[name]
    sizes = (shape.n_heads, shape.n_kv_heads) if name in SHARES_HEADS else (shape.n_heads,) * 2
    # as the projections write them: [B, S, H, K] seen as [B, H, S, K]
    q, k, v = (
        torch.randn(shape.n_samples, shape.n_positions, n, shape.d_head, dtype=dtype, device=device)
        .transpose(1, 2)
        .requires_grad_()
        for n in (sizes[0], sizes[1], sizes[1])
    )
    grad = torch.randn_like(q)

    def run() -> None:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, scale=shape.d_head**-0.5, enable_gqa=sizes[0] != sizes[1]
        )
        torch.autograd.grad(out, (q, k, v), grad)

    _activate_flash(implementation)
    try:
        with sdpa_kernel([backend]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch explains at length why a backend does not run
            for _ in range(WARM_UP):
                run()
            milliseconds = [_time(run, device) for _ in range(TIMED)]
    finally:
        _activate_flash(None)
    return median(milliseconds)


def _time(run: Callable[[], None], device: torch.device) -> float:
    """Return the milliseconds that the device takes for a call: the mean of several."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(CALLS):
            run()
        return (time.perf_counter() - started) * 1e3 / CALLS
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(LAUNCH_CYCLES)
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / CALLS


def _activate_flash(implementation: str | None) -> None:
    """Let FlashAttention 3 or 4 replace torch's version 2; None restores it. Raises where not installed."""
    current = getattr(torch_attention, "current_flash_attention_impl", lambda: None)()
    if implementation == current:
        return
    if implementation is None:
        torch_attention.restore_flash_attention_impl()
        return
    if not hasattr(torch_attention, "activate_flash_attention_impl"):  # torch below 2.11
        raise ImportError(f"torch {torch.__version__} cannot use {implementation}")
    torch_attention.activate_flash_attention_impl(implementation)


def tag_compiled_code(name: str) -> None:
    """Separate the compiled code of a backend from that of others in the compiler's cache on disk.

    The key of that cache contains no state of attention: a run with another backend would load code that
    calls the first one's kernel.
    """
    if hasattr(torch.compiler.config, "cache_key_tag"):
        prefix = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
        tag = f"sdpa={name},cudnn={torch.backends.cudnn.version()}"
        torch.compiler.config.cache_key_tag = f"{prefix},{tag}" if prefix else tag


def use_attention_backend(choice: AttentionChoice) -> None:
    """Make a backend the first in torch's order, for this process until the next call."""
    _contexts.close()
    _active.clear()
    tag_compiled_code(choice.name)
    if choice.name not in BACKENDS:
        _activate_flash(None)
        return
    backend, implementation = BACKENDS[choice.name]
    _activate_flash(implementation)
    # masks, float32 or wide heads may need another backend: math last, since it stores all scores
    order = [backend, *(other for other, _ in BACKENDS.values() if other != backend)]
    _contexts.enter_context(sdpa_kernel(list(dict.fromkeys(order)), set_priority=True))
    _active.append(choice.name)


def supports_shared_heads(dtype: torch.dtype, d_head: int) -> bool:
    """Return whether the GPU kernels in use read shared key and value heads without a copy."""
    # other dtypes and wider heads need the kernels `efficient` or `math`, which would store all scores
    if dtype not in (torch.bfloat16, torch.float16) or d_head > 128:
        return False
    return not _active or _active[0] in SHARES_HEADS
