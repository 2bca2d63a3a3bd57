"""Memory use of the ranks, and explanation of out-of-memory errors."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.parallel.world import World

# messages in a plain RuntimeError: from torch's CPU
# allocator, and from the compiler, which wraps a GPU's
OOM_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")


def measure_memory(device: torch.device) -> tuple[float, float]:
    """Return (peak GiB, fraction of the total memory): reserved memory on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        # reserved, not allocated: blocks cached by the
        # allocator are not available to other processes either
        used = torch.cuda.max_memory_reserved(device)
        whole = torch.cuda.get_device_properties(device).total_memory
    else:
        # ru_maxrss is in bytes on macOS and in KiB on Linux
        unit = 1 if sys.platform == "darwin" else 1024
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return used / 2**30, used / whole


@contextmanager
def explain_oom(step: int, key: str, rows: int, seq_len: int, world: World) -> Iterator[None]:
    """Turn an out-of-memory error into a ValueError with the peak and a fix.

    key    configuration key of the number of samples per forward
    rows   its current value
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        plain = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if not plain and not any(words in str(error) for words in OOM_MESSAGES):
            raise
        used, fraction = measure_memory(world.device)
        fix = f"Set {key} to {rows // 2} or less" if rows > 1 else "Lower dataset.seq_len"
        raise ValueError(
            f"step {step}, rank {world.rank}: out of memory on {world.device} at a peak of {used:.2f} of "
            f"{used / fraction:.2f} GiB, with {rows} samples of {seq_len} tokens per forward. {fix}, "
            "or use more ranks."
        ) from error
