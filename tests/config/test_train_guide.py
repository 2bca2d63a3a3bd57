"""TRAIN.md quotes real messages in its section "Errors", and names existing options."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.config.parallelism import build_layout
from megatron.config.schema import DistConfig, ModelConfig, ObjectiveConfig
from megatron.parallel.rank_env import ranks_from_environment
from megatron.plan.resolve import load_config
from tests.wrong_values import read_refusal

SMALL = "examples_scaling/training/small.yaml"


@pytest.fixture(scope="module")
def messages(root: Path) -> list[str]:
    """Return the quoted messages in the first column of the table of failures."""
    guide = (root / "examples_scaling" / "training" / "TRAIN.md").read_text()
    return re.findall(r"^\| `(.+?)` \| ", guide.partition("## Errors")[2], re.MULTILINE)


def test_the_table_of_failures_has_the_real_messages(
    root: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    assert len(messages) >= 10 and all("|" not in message for message in messages)
    monkeypatch.chdir(root)
    for words, key in (
        (["model.n_tokens=300", "optim.lrr=1"], "lrr"),
        (["model.n_tokens=300", "lr_scheduler.total_epochs=2"], "give the length"),
        (["dataset.path_train=data/nowhere"], "data/nowhere"),
        (["model.n_tokens=300", "model.size=425"], "'425'"),
        (["model.n_tokens=300", "model.n_heads=2", "dist.tensor_parallel=3"], "dist.tensor_parallel 3"),
    ):
        (shown,) = [message for message in messages if key in message]
        refusal = read_refusal(lambda: load_config(Path(SMALL), words))  # noqa: B023
        assert str(refusal).endswith(shown.split(": ", 2)[2].removeprefix("..."))
    for read in (
        lambda: ranks_from_environment({"WORLD_SIZE": "2"}),
        lambda: ranks_from_environment({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),
        lambda: build_layout(DistConfig(pipeline_parallel=2), 1, 1),
    ):
        assert f"error: {read_refusal(read)}" in messages


def test_the_guide_names_only_options_that_exist(root: Path) -> None:
    text = (root / "examples_scaling" / "training" / "TRAIN.md").read_text()
    option_names = {option.name for section in (ModelConfig, ObjectiveConfig) for option in fields(section)}
    documented = re.findall(r"(?:model|objective)\.(\w+)", text)
    assert len(set(documented)) > 10
    assert set(documented) <= option_names | {"hf_config"}
