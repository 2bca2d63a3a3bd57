"""tools/pretrain.py, killed as soon as its third checkpoint has appeared."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from megatron.checkpoint import store

seal = store.commit_checkpoint
n_sealed = 0


def seal_and_die(*words: Any) -> None:
    global n_sealed
    seal(*words)
    n_sealed += 1
    if n_sealed == 3:
        os.kill(os.getpid(), signal.SIGKILL)


store.commit_checkpoint = seal_and_die
tool = Path(__file__).resolve().parents[2] / "tools" / "pretrain.py"
runpy.run_path(str(tool), run_name="__main__")
