"""The numbers of utils/epoch_tokens.yaml."""

import csv
from pathlib import Path

from omegaconf import OmegaConf


def test_epoch_tokens_are_the_published_counts(root: Path, scaling_data: Path) -> None:
    epoch_tokens = OmegaConf.to_container(OmegaConf.load(root / "utils" / "epoch_tokens.yaml"))
    with (scaling_data / "epoch_tokens.csv").open() as file:
        assert epoch_tokens == {row["name"]: int(row["tokens"]) for row in csv.DictReader(file)}
