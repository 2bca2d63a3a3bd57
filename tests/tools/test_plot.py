"""Tests of --plot: the figure of a command has the numbers that the command prints."""

import json
import re
from pathlib import Path

import pytest

from tests.tools.conftest import read_traces


def test_a_dry_run_draws_each_run(cli, tmp_path: Path) -> None:
    cli("init", tmp_path / "study.yaml")
    words = ("sweep", tmp_path / "study.yaml", "--dry-run", "--hardware", "H100")
    synthetic = ("run.dataset.path_train=synthetic", "run.dataset.path_eval=synthetic")
    output = cli(*words, *synthetic, "--plot", tmp_path / "price.html").output
    (runs,) = read_traces(tmp_path / "price.html")
    sizes = {int(word.replace(",", "")) for word in re.findall(r"^AR\S+ +([\d,]+)", output, re.MULTILINE)}
    assert set(runs["y"]) == sizes


def test_differences_are_drawn_with_intervals(cli, tmp_path: Path) -> None:
    """Two cells of two seeds."""
    runs = ["small-0,small,0,3.2", "small-1,small,1,3.21", "large-0,large,0,3.0", "large-1,large,1,3.01"]
    lines = ["run,cell,seed,loss,status,objective", *(f"{run},done,autoregressive" for run in runs)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    words = ("compare", tmp_path / "t.csv", "large", "small", "--json")
    (difference,) = json.loads(cli(*words, "--plot", tmp_path / "compare.html").output)["differences"]
    (point,) = read_traces(tmp_path / "compare.html")
    (x,), (bar,) = point["x"], point["error_x"]["array"]
    assert [x, x + bar] == pytest.approx([difference["difference"], difference["interval"][1]])
