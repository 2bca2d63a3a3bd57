"""Tests of tools/bench/coordinate_check.py from the command line."""

import subprocess
import sys
from pathlib import Path

import pytest


def run_tool(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(root / "tools" / "bench" / "coordinate_check.py"),
        "--threads",
        "1",
        *words,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_it_prints_a_slope_for_each_sweep_and_writes_a_page(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    done = run_tool(
        root, "--widths", "16", "64", "--depths", "2", "8", "--d-head", "16", "--steps", "2", "--seeds", "1",
        "--n-tokens", "50", "--out", str(page),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:7]]
    assert [line[:2] for line in lines] == [
        [axis, kind] for axis in ("width", "depth") for kind in ("standard", "mup", "completep")
    ]
    residual = {(line[0], line[1]): float(line[5]) for line in lines}
    assert residual["width", "standard"] > 0.6 > 0.3 > abs(residual["width", "mup"])
    assert residual["depth", "mup"] > 0.5 > 0.2 > abs(residual["depth", "completep"])
    text = page.read_text()
    assert "Coordinate check" in text
    assert 'id="plot-width"' in text and 'id="plot-depth"' in text


def test_a_single_size_is_refused(root: Path) -> None:
    done = run_tool(root, "--widths", "64")
    assert done.returncode == 2
    assert "expected at least two for a slope" in done.stderr
