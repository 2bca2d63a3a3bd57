"""The list of named sizes, as a person asks for it."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.config.presets import model_sizes, padded_rows
from megatron.config.schema import ModelConfig
from megatron.model.gpt import Gpt

Listed = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def listed(root: Path) -> Listed:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tools" / "model_sizes.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    return run


def test_every_name_stands_beside_the_size_of_the_built_model(listed: Listed) -> None:
    told = listed()
    rows = [line.split() for line in told.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == list(model_sizes())
    for row in rows[::9]:  # tests/config/test_count.py builds them all
        with torch.device("meta"):
            model = Gpt(ModelConfig(**model_sizes()[row[0]], n_tokens=50257, vocab_rows=padded_rows(50257)))
        assert row[1] == f"{sum(parameter.numel() for parameter in model.parameters()):,}"


def test_the_table_in_the_guide_is_what_the_tool_prints(root: Path, listed: Listed) -> None:
    guide = (root / "examples_scaling" / "training" / "TRAIN.md").read_text()
    assert f"$ python tools/model_sizes.py\n{listed().stdout}```" in guide


def test_options_change_the_count_and_20_tokens_a_parameter_the_flops(listed: Listed) -> None:
    plain, untied = (
        [int(listed("7M", "--n-tokens", "255", *more).stdout.splitlines()[1].split()[1].replace(",", ""))]
        for more in ((), ("model.tied_embedding=false",))
    )
    assert untied[0] - plain[0] == 256 * 128
    told = (
        listed("7M", "--n-tokens", "255", "--tokens", "1e9", "--seq-len", "1").stdout.splitlines()[1].split()
    )
    # by hand at one position: 6 (N without norms, 3 blocks of 2 gains and one more) + 12 L H K
    assert float(told[-1]) == pytest.approx(1e9 * (6 * (plain[0] - 7 * 128) + 12 * 3 * 4 * 32), rel=5e-3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["117"], "'117' is not in model_sizes.yaml; did you mean '117M'?"),
        (["7M", "model.n_kv_heads=3"], "7M: model.n_kv_heads: 3 does not divide the 4 heads"),
        (["7M", "optim.lr=1"], "'optim': options of the model only"),
    ],
)
def test_what_is_not_known_is_refused_in_one_sentence(
    listed: Listed, words: list[str], sentence: str
) -> None:
    told = listed(*words)
    assert told.returncode == 1
    assert sentence in told.stderr and told.stderr.count("\n") == 1


def test_conventions_stand_side_by_side_in_units_of_6nd(root: Path) -> None:
    words = [sys.executable, str(root / "tools" / "model_sizes.py"), "7M", "117M", "--conventions"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["name", "exact", "6nd", "kaplan", "palm", "megatron", "chinchilla"]
    for line in lines[:2]:
        exact, six, _, _, _, chinchilla = (float(share) for share in re.findall(r"\(([\d.]+)\)", line))
        assert six == 1.0 and chinchilla > exact > 1.0
