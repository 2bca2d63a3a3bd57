"""Tests of scaling frontier on a table of runs."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from tests.tool_modules import load_command

main = load_command("frontier").main
E, A, B, ALPHA, BETA = 1.8, 480.0, 2080.0, 0.35, 0.37


def best_size(flops: float) -> float:
    """Return N of the lowest loss at C = 6 N D."""
    return (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * (flops / 6) ** (BETA / (ALPHA + BETA))


def loss_of(n: float, flops: float) -> float:
    return E + A / n**ALPHA + B / (flops / (6 * n)) ** BETA


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Four sizes at five budgets of a Chinchilla surface with 0.2 % of noise, and rows of another corpus."""
    rng = np.random.default_rng(0)
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["n_params", "train_tokens", "loss", "flops", "corpus"])
        for corpus, worse in (("c4", 1.0), ("code", 1.5)):
            for flops in np.geomspace(1e17, 1e20, 5):
                for ratio in (0.4, 0.8, 1.5, 3.0):
                    n = best_size(flops) * ratio
                    noise = np.exp(0.002 * rng.standard_normal())
                    writer.writerow([n, flops / (6 * n), worse * loss_of(n, flops) * noise, flops, corpus])
    return path


def test_the_optimum_of_a_table_is_that_of_its_surface(table: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "law.json"
    words = [
        str(table),
        "--flops-by",
        "flops",
        "--where",
        "corpus == 'c4'",
        "--budgets",
        "1e19",
        "4e20",
    ]
    assert main([*words, "--out", str(out)]) == 0
    law = json.loads(out.read_text())
    assert abs(law["params"]["size_exponent"] - BETA / (ALPHA + BETA)) < 0.02
    lines = [
        line.split()
        for line in capsys.readouterr().out.splitlines()
        if line.strip().startswith(("1.00e+19", "4.00e+20"))
    ]
    assert len(lines) == 2
    for flops, words in zip((1e19, 4e20), lines, strict=True):
        loss = loss_of(best_size(flops), flops)
        numbers = [float(word) for word in words if word.replace(".", "").isdigit()]
        assert any(abs(number / loss - 1) < 0.01 for number in numbers), (loss, words)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--where", "corpus == 'wiki'"], "corpus"),
        (["--predict"], "expected a study's directory"),
        (["--flops-by", "FLOPs"], "FLOPs"),
    ],
)
def test_a_column_or_option_that_a_table_does_not_have_is_refused(
    table: Path, more: list[str], message: str, capsys
) -> None:
    assert main([str(table), *more]) == 1
    assert message in capsys.readouterr().err
    assert not list(table.parent.glob("*.json"))
