"""The guide to training names existing options of models and objectives."""

import re
from dataclasses import fields
from pathlib import Path

from megatron.config.schema import ModelConfig, ObjectiveConfig


def test_the_guide_names_only_options_that_exist(root: Path) -> None:
    text = (root / "examples_scaling" / "training" / "TRAIN.md").read_text()
    option_names = {option.name for section in (ModelConfig, ObjectiveConfig) for option in fields(section)}
    documented = re.findall(r"(?:model|objective)\.(\w+)", text)
    assert len(set(documented)) > 10
    assert set(documented) <= option_names | {"hf_config"}
