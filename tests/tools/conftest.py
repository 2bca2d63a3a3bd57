"""Simulated runs under a known law, and figures that commands wrote."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.laws.forms import FORM

TRUTH = {"E": 1.8, "A": 300.0, "B": 500.0, "alpha": 0.33, "beta": 0.3}


def simulate_runs(n_sizes: int, n_lengths: int, noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Return n_params, train_tokens and loss of a grid of runs, with a relative noise of the loss."""
    grid = np.meshgrid(np.geomspace(1e7, 1e9, n_sizes), np.geomspace(1e9, 1e11, n_lengths), indexing="ij")
    n, d = (axis.ravel() for axis in grid)
    loss = FORM["chinchilla"].loss(TRUTH, n, d)
    loss = loss * np.exp(noise * np.random.default_rng(seed).standard_normal(len(n)))
    return pd.DataFrame({"n_params": n, "train_tokens": d, "loss": loss})


def read_traces(page: Path) -> list[dict[str, Any]]:
    """Return the traces of a page of plotly."""
    text = page.read_text()
    start = text.index("[", text.rindex("Plotly.newPlot("))
    return json.JSONDecoder().raw_decode(text[start:])[0]
