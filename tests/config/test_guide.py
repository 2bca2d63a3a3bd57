"""The guide to models names exactly the existing options."""

import re
from dataclasses import fields
from pathlib import Path

from megatron.config.option import IF_CHANGED
from megatron.config.schema import ModelConfig, ObjectiveConfig


def test_the_guide_names_every_option_of_shapes_and_objectives_and_no_other(root: Path) -> None:
    text = (root / "examples_scaling" / "training" / "MODELS.md").read_text()
    for section in (ModelConfig, ObjectiveConfig):
        for option in fields(section):
            if option.metadata["identity"] == IF_CHANGED:
                assert re.search(rf"\b{option.name}\b", text), f"{option.name} is not in the guide"
    option_names = {option.name for section in (ModelConfig, ObjectiveConfig) for option in fields(section)}
    documented = re.findall(r"^\| `(\w+): ", text, re.MULTILINE) + re.findall(
        r"(?:model|objective)\.(\w+)", text
    )
    assert len(documented) > 15
    assert set(documented) <= option_names | {"hf_config"}
