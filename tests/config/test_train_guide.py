"""TRAIN.md quotes real messages in its section "Errors"."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron.config.parallelism import build_layout
from megatron.config.schema import DistConfig
from megatron.parallel.rank_env import ranks_from_environment
from megatron.plan.resolve import load_config

SMALL = "examples_scaling/training/small.yaml"


@pytest.fixture(scope="module")
def guide(root: Path) -> str:
    return (root / "examples_scaling" / "training" / "TRAIN.md").read_text()


@pytest.fixture(scope="module")
def messages(guide: str) -> list[str]:
    """Return the quoted messages in the first column of the table of failures."""
    return re.findall(r"^\| `(.+?)` \| ", guide.partition("## Errors")[2], re.MULTILINE)


def test_the_table_of_failures_is_found(messages: list[str]) -> None:
    assert len(messages) >= 10 and all("|" not in message for message in messages)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["model.n_tokens=300", "optim.lrr=1"], "lrr"),
        (["model.n_tokens=300", "lr_scheduler.total_epochs=2"], "give the length"),
        (["dataset.path_train=data/nowhere"], "data/nowhere"),
        (["model.n_tokens=300", "model.size=425"], "'425'"),
        (["model.n_tokens=300", "model.n_heads=2", "dist.tensor_parallel=3"], "dist.tensor_parallel 3"),
    ],
)
def test_a_refused_setting_has_the_message_in_the_guide(
    root: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str], words: list[str], key: str
) -> None:
    monkeypatch.chdir(root)
    (shown,) = [message for message in messages if key in message]
    with pytest.raises((ValueError, OSError)) as failed:
        load_config(Path(SMALL), words)
    assert str(failed.value).endswith(shown.split(": ", 2)[2].removeprefix("..."))


@pytest.mark.parametrize(
    "environment", [{"WORLD_SIZE": "2"}, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}], ids=str
)
def test_an_incomplete_environment_has_the_message_in_the_guide(
    messages: list[str], environment: Mapping[str, str]
) -> None:
    with pytest.raises(ValueError) as failed:
        ranks_from_environment(environment)
    assert f"error: {failed.value}" in messages


def test_too_few_ranks_have_the_message_in_the_guide(messages: list[str]) -> None:
    with pytest.raises(ValueError) as failed:
        build_layout(DistConfig(pipeline_parallel=2), 1, 1)
    assert f"error: {failed.value}" in messages
