"""TRAIN.md shows what the project says: its sizes, and the messages under "What went wrong"."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron.config.launcher import ranks_from_environment
from megatron.config.layout import layout_of
from megatron.config.read import read_config
from megatron.config.schema import DistConfig

SMALL = "examples_scaling/training/small.yaml"


@pytest.fixture(scope="module")
def guide(root: Path) -> str:
    return (root / "examples_scaling" / "training" / "TRAIN.md").read_text()


@pytest.fixture(scope="module")
def messages(guide: str) -> list[str]:
    """What stands in backquotes in the first column of the table of failures."""
    return re.findall(r"^\| `(.+?)` \| ", guide.partition("## What went wrong")[2], re.MULTILINE)


def test_the_table_of_failures_is_found(messages: list[str]) -> None:
    assert len(messages) > 12 and all("|" not in one for one in messages)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["model.n_tokens=300", "optim.lrr=1"], "optim.lrr"),
        (["model.n_tokens=300", "lr_scheduler.total_epochs=2"], "give the length"),
        (["dataset.path_train=data/nowhere"], "data/nowhere"),
        (["model.n_tokens=300", "model.size=425"], "'425'"),
        (["model.n_tokens=300", "model.n_heads=2", "dist.tensor_parallel=3"], "dist.tensor_parallel 3"),
    ],
)
def test_a_refused_setting_is_told_as_the_guide_shows(
    root: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str], words: list[str], key: str
) -> None:
    monkeypatch.chdir(root)
    (shown,) = [one for one in messages if key in one]
    with pytest.raises((ValueError, OSError)) as failed:
        read_config(Path(SMALL), words)
    assert str(failed.value).endswith(shown.split(": ", 2)[2].removeprefix("..."))


@pytest.mark.parametrize(
    "environment", [{"WORLD_SIZE": "2"}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}], ids=str
)
def test_half_an_environment_is_told_as_the_guide_shows(
    messages: list[str], environment: Mapping[str, str]
) -> None:
    with pytest.raises(ValueError) as failed:
        ranks_from_environment(environment)
    assert f"error: {failed.value}" in messages


def test_too_few_ranks_are_told_as_the_guide_shows(messages: list[str]) -> None:
    with pytest.raises(ValueError) as failed:
        layout_of(DistConfig(pipeline_parallel=2), 1, 1)
    assert f"error: {failed.value}" in messages
