"""tools/pretrain.py, killed as soon as its third checkpoint has appeared."""

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from megatron.checkpoint import store

save = store.save_checkpoint_as
n_saved = 0


def save_and_die(*words: Any) -> None:
    global n_saved
    save(*words)
    n_saved += 1
    if n_saved == 3:
        os.kill(os.getpid(), signal.SIGKILL)


store.save_checkpoint_as = save_and_die
tool = Path(__file__).resolve().parents[2] / "tools" / "pretrain.py"
runpy.run_path(str(tool), run_name="__main__")
