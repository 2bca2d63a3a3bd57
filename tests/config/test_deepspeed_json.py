"""Open keys of a configuration are set by its DeepSpeed JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.deepspeed_json import adopt_deepspeed_json
from megatron.config.read import read_config

CPU = {"device": "cpu", "pin_memory": True}
ZERO3 = {"dist.sharding_stage": "zero3"}
# values, and the settings that they give
ADOPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"zero_optimization": {"stage": 2}}, {"dist.sharding_stage": "zero2"}),
    ({"zero_optimization": {"stage": 0, "offload_optimizer": CPU}}, {"dist.sharding_stage": "zero0"}),
    (
        {"zero_optimization": {"stage": 1, "offload_optimizer": CPU, "offload_param": CPU}},
        {"dist.sharding_stage": "zero1", "dist.offload_optimizer": True},
    ),
    ({"zero_optimization": {"stage": 3, "offload_param": CPU}}, {**ZERO3, "dist.offload_parameters": True}),
    ({"bf16": {"enabled": True}}, {"dist.dtype": "bfloat16"}),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, {"dist.dtype": "float16"}),
    ({"gradient_clipping": 0.5, "train_batch_size": 24}, {"optim.grad_clip": 0.5, "dataset.batch_size": 24}),
    ({"train_micro_batch_size_per_gpu": 2}, {"dataset.microbatch_size": 2}),
    (
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": "auto"}}},
        {"optim.lr": 1e-4, "optim.beta1": 0.8, "optim.beta2": 0.9},
    ),
    ({"zero_optimization": {"stage": "auto"}, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}, {}),
    ({"zero_optimization": 3, "optimizer": 4, "bf16": True}, {}),
]


@pytest.mark.parametrize(("theirs", "expected"), ADOPTED)
def test_each_value_sets_its_key_unless_the_configuration_does(theirs, expected, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(theirs))
    result, adopted = adopt_deepspeed_json({"dist": {"deepspeed_config": str(path)}})
    expected_lines = [f"{key}={value}" for key, value in expected.items()]
    assert [line.partition("  ")[2] for line in adopted] == expected_lines
    for key, value in expected.items():
        section, _, name = key.partition(".")
        assert result[section][name] == value
        raw = {"dist": {"deepspeed_config": str(path)}}
        raw.setdefault(section, {})[name] = "mine"
        unchanged, _ = adopt_deepspeed_json(raw)
        assert unchanged[section][name] == "mine"


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_an_unusable_file_sets_nothing(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    raw = {"dist": {"deepspeed_config": str(path)}}
    assert adopt_deepspeed_json(raw) == (raw, [])


def test_a_run_file_without_stage_and_dtype_gets_those_of_its_json(tmp_path: Path) -> None:
    path, run = tmp_path / "ds.json", tmp_path / "run.yaml"
    theirs = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}, "train_batch_size": 6}
    path.write_text(json.dumps(theirs))
    run.write_text(
        f"dist: {{engine: deepspeed, deepspeed_config: {path}}}\n"
        "model: {d_model: 8, n_heads: 2, n_layers: 1, "
        "n_tokens: 9}\nlr_scheduler: {total_iterations: 3}\n"
    )
    config = read_config(run, ["dataset.batch_size=4"])
    assert (config.dist.sharding_stage, config.dist.dtype) == ("zero1", "float16")
    assert config.dataset.batch_size == 4  # the command line wins
