"""tools/mixture_server.py in which an answer takes now longer and now shorter."""

import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron.mixture.service import Desk

rng = np.random.default_rng()
chunks = Desk.chunks


def late(self: Desk, ticket: bytes, client: str) -> Any:
    time.sleep(float(rng.uniform(0, 0.1)))
    table = chunks(self, ticket, client)
    time.sleep(float(rng.uniform(0, 0.1)))
    return table


Desk.chunks = late
tool = Path(__file__).resolve().parents[2] / "tools" / "mixture_server.py"
runpy.run_path(str(tool), run_name="__main__")
