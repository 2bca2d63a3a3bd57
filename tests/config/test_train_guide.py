"""TRAIN.md quotes real messages in its section "Errors", and names existing options."""

import re
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from megatron.config.parallelism import build_layout
from megatron.config.schema import DistConfig, ModelConfig, ObjectiveConfig
from megatron.parallel.rank_env import ranks_from_environment
from megatron.plan.resolve import load_config
from tests.wrong_values import read_refusal

SMALL = Path("examples_scaling/training/small.yaml")
REFUSED_WORDS = (
    "model.n_tokens=300 optim.lrr=1",
    "model.n_tokens=300 lr_scheduler.total_epochs=2",
    "dataset.path_train=data/nowhere",
    "model.n_tokens=300 model.size=425",
    "model.n_tokens=300 model.n_heads=2 dist.tensor_parallel=3",
)


def test_the_guide_has_real_messages_and_existing_options(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    text = Path("examples_scaling/training/TRAIN.md").read_text()
    # `error: ...small.yaml: the sentence` in the first column of the table of failures
    rows = text.partition("## Errors")[2]
    shown = re.findall(r"^\| `error: (?:\.\.\.\S*: )?(.+?)` \| ", rows, re.MULTILINE)
    assert len(shown) >= 10
    for read in (
        *(partial(load_config, SMALL, words.split()) for words in REFUSED_WORDS),
        partial(ranks_from_environment, {"WORLD_SIZE": "2"}),
        partial(ranks_from_environment, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),
        partial(build_layout, DistConfig(pipeline_parallel=2), 1, 1),
    ):
        refusal = str(read_refusal(read))
        assert any(refusal.endswith(message) for message in shown), refusal
    option_names = {option.name for section in (ModelConfig, ObjectiveConfig) for option in fields(section)}
    documented = set(re.findall(r"(?:model|objective)\.(\w+)", text))
    assert len(documented) > 10 and documented <= option_names | {"hf_config"}
