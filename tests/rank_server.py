"""Imported by the server of tests/rank_processes.py: what ranks would import one by one.

A library that starts threads when it is imported cannot be in this list: the server forks.
"""

import atexit
import gc
import os
from importlib import import_module

for name in (
    "pytest",
    "filelock",
    "numpy.ma",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "megatron.mixture.prepare",
    "megatron.train.loop",
    "tests.rank_processes",
):
    import_module(name)
gc.collect()
gc.freeze()  # ranks do not copy the pages of these objects
# the interpreter's end would print what triton's bindings leak
atexit.register(os._exit, 0)
