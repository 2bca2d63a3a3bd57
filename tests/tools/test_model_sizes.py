"""Tests of scaling sizes from the command line."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.config.presets import load_model_sizes, padded_rows
from megatron.config.schema import ModelConfig
from megatron.model.transformer import Gpt

Listed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def listed(root: Path) -> Listed:
    def run_tool(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tools" / "plan.py"), "sizes", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    return run_tool


def test_every_name_is_listed_with_the_parameter_count_of_the_built_model(listed: Listed) -> None:
    done = listed()
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == list(load_model_sizes())
    for row in rows[::9]:  # tests/plan/test_count.py builds all of them
        with torch.device("meta"):
            model = Gpt(
                ModelConfig(**load_model_sizes()[row[0]], n_tokens=50257, vocab_rows=padded_rows(50257))
            )
        assert row[1] == f"{sum(parameter.numel() for parameter in model.parameters()):,}"


def test_the_table_in_the_guide_is_what_the_tool_prints(root: Path, listed: Listed) -> None:
    guide = (root / "examples_scaling" / "training" / "TRAIN.md").read_text()
    assert f"$ scaling sizes\n{listed().stdout}```" in guide


def test_options_change_the_count_and_20_tokens_a_parameter_the_flops(listed: Listed) -> None:
    plain, untied = (
        [int(listed("7M", "--n-tokens", "255", *more).stdout.splitlines()[1].split()[1].replace(",", ""))]
        for more in ((), ("model.tied_embedding=false",))
    )
    assert untied[0] - plain[0] == 256 * 128
    cells = (
        listed("7M", "--n-tokens", "255", "--tokens", "1e9", "--seq-len", "1").stdout.splitlines()[1].split()
    )
    # by hand at one position: 6 (N without norms, 3 blocks of 2 gains and one more) + 12 L H K
    assert float(cells[-1]) == pytest.approx(1e9 * (6 * (plain[0] - 7 * 128) + 12 * 3 * 4 * 32), rel=5e-3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["117"], "'117' is not in model_sizes.yaml; did you mean '117M'?"),
        (["7M", "model.n_kv_heads=3"], "7M: model.n_kv_heads: got 3, expected a divisor of model.n_heads 4"),
        (["7M", "optim.lr=1"], "got 'optim.lr=1', expected an option of the model"),
    ],
)
def test_unknown_sizes_and_options_are_reported_in_one_line(
    listed: Listed, words: list[str], sentence: str
) -> None:
    done = listed(*words)
    assert done.returncode == 1
    assert sentence in done.stderr and done.stderr.count("\n") == 1


def test_conventions_are_listed_side_by_side_in_units_of_6nd(root: Path) -> None:
    words = [sys.executable, str(root / "tools" / "plan.py"), "sizes", "7M", "117M", "--conventions"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["name", "exact", "6nd", "kaplan", "palm", "megatron", "chinchilla"]
    for line in lines[:2]:
        exact, six, _, _, _, chinchilla = (float(share) for share in re.findall(r"\(([\d.]+)\)", line))
        assert six == 1.0 and chinchilla > exact > 1.0
