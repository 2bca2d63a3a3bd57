"""tools/pretrain.py that prints the timeouts of all process groups, with one slow operation.

SLOW=<rank>:<seconds>:<operation>, operation: first_step, save or data
"""

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.checkpoint import store
from megatron.engine.deepspeed.deepspeed_zero import DeepSpeedEngine
from megatron.engine.torch.torch_native import TorchEngine
from megatron.objective.autoregressive import Autoregressive

rank, seconds, what = os.environ.get("SLOW", "-1:0:nothing").split(":")
is_slow = os.environ.get("RANK", "0") == rank
waited: list[float] = []


def slow_once(function: Callable[..., Any]) -> Callable[..., Any]:
    def run_slowly(*words: Any, **more: Any) -> Any:
        if is_slow and not waited:
            waited.append(float(seconds))
            time.sleep(float(seconds))
        return function(*words, **more)

    return run_slowly


def read_timeouts() -> dict[str, float]:
    """Return the timeout in seconds of each group of this rank."""
    timeouts = {}
    for group in distributed_c10d._world.pg_map:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            backend = group._get_backend(torch.device("cpu"))
            timeouts[group.group_name] = backend.options._timeout.total_seconds()
    return timeouts


def print_timeouts_after_steps(engine: type) -> None:
    step = engine.step

    def step_and_print(self: Any, *words: Any, **more: Any) -> Any:
        report = step(self, *words, **more)
        print("limits", sorted(read_timeouts().values()), file=sys.stderr, flush=True)
        return report

    engine.step = step_and_print


print_timeouts_after_steps(TorchEngine)
print_timeouts_after_steps(DeepSpeedEngine)
if what == "first_step":
    TorchEngine.step = slow_once(TorchEngine.step)
if what == "save":
    store.save_checkpoint = slow_once(store.save_checkpoint)
if what == "data":
    Autoregressive.corrupt = slow_once(Autoregressive.corrupt)
tool = Path(__file__).resolve().parents[2] / "tools" / "pretrain.py"
runpy.run_path(str(tool), run_name="__main__")
