"""tools/mixture_server.py with random delays before and after each response."""

import runpy
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron.mixture.serve.service import RequestHandler

rng = np.random.default_rng()
stream_chunks = RequestHandler.stream_chunks


def stream_late(self: RequestHandler, ticket: bytes, client: str) -> Any:
    time.sleep(float(rng.uniform(0, 0.1)))
    table = stream_chunks(self, ticket, client)
    time.sleep(float(rng.uniform(0, 0.1)))
    return table


RequestHandler.stream_chunks = stream_late
tool = Path(__file__).resolve().parents[2] / "tools" / "mixture_server.py"
runpy.run_path(str(tool), run_name="__main__")
