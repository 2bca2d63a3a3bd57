"""tools/pretrain.py in which the held-out losses of some scorings are no numbers: BAD_SCORINGS=1,2."""

import os
import runpy
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from megatron.evaluation.validate import HeldOut
from megatron.train import loop

bad = {int(word) for word in os.environ["BAD_SCORINGS"].split(",")}
validate, calls = loop.validate, count(1)


def poisoned(*positional: Any, **named: Any) -> HeldOut:
    held_out = validate(*positional, **named)
    return replace(held_out, loss=float("nan"), loss_se=float("inf")) if next(calls) in bad else held_out


loop.validate = poisoned
tool = Path(__file__).resolve().parents[2] / "tools" / "pretrain.py"
runpy.run_path(str(tool), run_name="__main__")
