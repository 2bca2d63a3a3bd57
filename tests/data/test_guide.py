"""The numbers of utils/epoch_tokens.yaml."""

import csv
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

TOKENS = re.compile(r"^[0-9].*_([0-9]+)ep$")


@pytest.fixture(scope="module")
def epoch_tokens(root: Path) -> dict[str, int]:
    return OmegaConf.to_container(OmegaConf.load(root / "utils" / "epoch_tokens.yaml"))


def test_epoch_tokens_are_the_published_counts(scaling_data: Path, epoch_tokens: dict[str, int]) -> None:
    with (scaling_data / "epoch_tokens.csv").open() as file:
        assert epoch_tokens == {row["name"]: int(row["tokens"]) for row in csv.DictReader(file)}


def test_a_part_for_k_epochs_has_a_kth_of_the_tokens(epoch_tokens: dict[str, int]) -> None:
    for name, tokens in epoch_tokens.items():
        if match := TOKENS.match(name):
            whole = epoch_tokens[name.split("_")[0]]
            assert abs(tokens * int(match[1]) / whole - 1) < 0.006, name
