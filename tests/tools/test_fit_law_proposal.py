"""fit_law.py on runs that do not identify a law: warnings, and the next command."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from megatron.laws.law import Law


def run_tool(root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "fit_law.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_law_that_is_not_identified_is_printed_with_a_warning(root: Path, tmp_path: Path) -> None:
    n, d = np.repeat([1e7, 2e7, 4e7], 3), np.tile([1e9, 2e9, 4e9], 3)
    loss = (1.8 + 300 / n**0.33 + 500 / d**0.3) * np.exp(0.01 * np.random.default_rng(1).standard_normal(9))
    table = tmp_path / "table.csv"
    rows = "".join(f"{a},{b},{c!r}\n" for a, b, c in zip(n, d, loss.tolist(), strict=True))
    table.write_text("n_params,train_tokens,loss\n" + rows)
    done = run_tool(root, table, "--out", tmp_path / "law.json")
    law = Law.load(tmp_path / "law.json")
    assert law.identified is False and "alpha" in law.not_identified
    assert "NOT IDENTIFIED by these runs: " in done.stdout.splitlines()[1]
    assert "  to do: choose runs to add with `scaling plan" in done.stdout.splitlines()[-1]
    assert any(
        line.startswith("  alpha") and line.endswith("not identified") for line in done.stdout.splitlines()
    )
