"""fit_law.py on runs that do not identify a law: warnings, and the next command."""

from pathlib import Path

import numpy as np

from megatron.laws.law import Law


def test_a_law_that_is_not_identified_is_printed_with_a_warning(cli, tmp_path: Path) -> None:
    n, d = np.repeat([1e7, 2e7, 4e7], 3), np.tile([1e9, 2e9, 4e9], 3)
    loss = (1.8 + 300 / n**0.33 + 500 / d**0.3) * np.exp(0.01 * np.random.default_rng(1).standard_normal(9))
    table = tmp_path / "table.csv"
    rows = "".join(f"{a},{b},{c!r}\n" for a, b, c in zip(n, d, loss.tolist(), strict=True))
    table.write_text("n_params,train_tokens,loss\n" + rows)
    done = cli("fit", table, "--out", tmp_path / "law.json", status=None)
    law = Law.load(tmp_path / "law.json")
    assert law.identified is False and "alpha" in law.not_identified
    assert "NOT IDENTIFIED by these runs: " in done.output.splitlines()[1]
    assert "  to do: choose runs to add with `scaling plan" in done.output.splitlines()[-1]
    assert any(
        line.startswith("  alpha") and line.endswith("not identified") for line in done.output.splitlines()
    )
