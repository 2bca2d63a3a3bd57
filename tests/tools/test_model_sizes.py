"""Tests of scaling sizes from the command line."""

import re

import pytest
import torch

from megatron.config.presets import load_model_sizes, padded_rows
from megatron.config.schema import ModelConfig
from megatron.model.transformer import Gpt


def test_every_name_is_listed_with_the_parameter_count_of_the_built_model(cli) -> None:
    rows = [line.split() for line in cli("sizes").output.splitlines()[1:]]
    assert [row[0] for row in rows] == list(load_model_sizes())
    for row in rows[::9]:  # tests/plan/test_count.py builds all of them
        shape = ModelConfig(**load_model_sizes()[row[0]], n_tokens=50257, vocab_rows=padded_rows(50257))
        with torch.device("meta"):
            model = Gpt(shape)
        assert row[1] == f"{sum(parameter.numel() for parameter in model.parameters()):,}"


def test_options_change_the_count_and_20_tokens_a_parameter_the_flops(cli) -> None:
    small = ("sizes", "7M", "--n-tokens", 255)
    plain, untied = (
        int(cli(*small, *more).output.splitlines()[1].split()[1].replace(",", ""))
        for more in ((), ("model.tied_embedding=false",))
    )
    assert untied - plain == 256 * 128
    cells = cli(*small, "--tokens", 1e9, "--seq-len", 1).output.splitlines()[1].split()
    # by hand at one position: 6 (N without norms, 3 blocks of 2 gains and one more) + 12 L H K
    assert float(cells[-1]) == pytest.approx(1e9 * (6 * (plain - 7 * 128) + 12 * 3 * 4 * 32), rel=5e-3)


def test_conventions_are_listed_side_by_side_in_units_of_6nd(cli) -> None:
    head, *lines = cli("sizes", "7M", "117M", "--conventions").output.splitlines()
    assert head.split() == ["name", "exact", "6nd", "kaplan", "palm", "megatron", "chinchilla"]
    for line in lines[:2]:
        exact, six, _, _, _, chinchilla = (float(share) for share in re.findall(r"\(([\d.]+)\)", line))
        assert six == 1.0 and chinchilla > exact > 1.0
