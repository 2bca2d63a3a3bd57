"""tools/pretrain.py that prints the time limit of all process groups, and is slow where it is told to be.

SLOW=<rank>:<seconds>:<what>, what: first_step, save, data
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
from megatron.engine.deepspeed_zero import DeepSpeedEngine
from megatron.engine.torch_native import TorchEngine
from megatron.objective.autoregressive import Autoregressive

rank, seconds, what = os.environ.get("SLOW", "-1:0:nothing").split(":")
is_slow = os.environ.get("RANK", "0") == rank
waited: list[float] = []


def slow_once(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*words: Any, **more: Any) -> Any:
        if is_slow and not waited:
            waited.append(float(seconds))
            time.sleep(float(seconds))
        return function(*words, **more)

    return wrapped


def limits() -> dict[str, float]:
    """Seconds by group, of those that this rank is in."""
    found = {}
    for group in distributed_c10d._world.pg_map:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            backend = group._get_backend(torch.device("cpu"))
            found[group.group_name] = backend.options._timeout.total_seconds()
    return found


def told(engine: type) -> None:
    step = engine.step

    def counted(self: Any, *words: Any, **more: Any) -> Any:
        report = step(self, *words, **more)
        print("limits", sorted(limits().values()), file=sys.stderr, flush=True)
        return report

    engine.step = counted


told(TorchEngine)
told(DeepSpeedEngine)
if what == "first_step":
    TorchEngine.step = slow_once(TorchEngine.step)
if what == "save":
    store.save = slow_once(store.save)
if what == "data":
    Autoregressive.corrupt = slow_once(Autoregressive.corrupt)
tool = Path(__file__).resolve().parents[2] / "tools" / "pretrain.py"
runpy.run_path(str(tool), run_name="__main__")
