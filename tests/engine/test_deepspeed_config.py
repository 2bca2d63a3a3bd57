"""Our settings in DeepSpeed's words, and contradictions named."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.schema import DistConfig, OptimConfig
from megatron.engine.deepspeed_config import FREE, _leaves, translate, with_users_own

OPTIM = OptimConfig(lr=1e-3, grad_clip=0.5)


def ours(**dist: Any) -> dict[str, Any]:
    return translate(DistConfig(engine="deepspeed", **dist), OPTIM, 4, 2, 3)


def laid_over(tmp_path: Path, theirs: Any, **dist: Any) -> dict[str, Any]:
    path = tmp_path / "theirs.json"
    path.write_text(theirs if isinstance(theirs, str) else json.dumps(theirs))
    return with_users_own(ours(**dist), path, OPTIM)


def test_the_batch_is_what_ranks_and_microbatches_make_of_it() -> None:
    told = ours(sharding_stage="zero2")
    assert told["train_batch_size"] == 2 * 3 * 4
    assert told["gradient_accumulation_steps"] == 3
    assert told["zero_optimization"]["stage"] == 2
    assert told["gradient_clipping"] == 0.5


@pytest.mark.parametrize(("dtype", "section"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_half_precision_keeps_float32_weights_somewhere(dtype: str, section: str) -> None:
    assert ours(dtype=dtype, sharding_stage="zero1")[section]["enabled"]
    whole = ours(dtype=dtype)
    assert not whole[section]["enabled"]
    assert whole["torch_autocast"]["enabled"]
    assert whole["communication_data_type"] == "fp32"


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3, ours 2"),
        ({"train_batch_size": 32}, "train_batch_size is 32, ours 24"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1, ours 3"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, ours 0.5"),
        ({"bfloat16": {"enabled": True}}, "bf16.enabled is True, ours False"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'Lamb', ours 'AdamW'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 2}}}, "optimizer.params.lr is 2, ours 0.001"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler is for lr_scheduler to say"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "is 'nvme', ours 'none'"),
        ({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload is True, ours False"),
        ({"zero_optimization": 3}, "zero_optimization is 3, wanted a section of keys"),
        ({"bf16": True}, "bf16 is True, wanted a section of keys"),
        ({"train_batch_size": {"of": 24}}, "train_batch_size.of is 24, wanted no section there"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is 'sum', ours 'mean'"),
        ({"elasticity": {"enabled": True}}, "elasticity is for dataset.batch_size to say"),
        ({"pipeline": {"stages": 2}}, "pipeline is for dist.pipeline_parallel to say"),
        (
            {"activation_checkpointing": {"partition_activations": True}},
            "activation_checkpointing is for dist.activation_checkpointing to say",
        ),
        ({"train_batch_szie": 24}, "train_batch_szie is no key, did you mean train_batch_size?"),
        ({"optimizer": "AdamW"}, "optimizer is 'AdamW', wanted a section with type and params"),
        ({"optimizer": {"params": 3}}, "wanted a section with type and params"),
        ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad is True, ours False"),
        ({"optimizer": {"params": {"bias_correction": False}}}, "params.bias_correction is False, ours True"),
    ],
)
def test_a_contradiction_is_refused_with_key_and_both_values(
    theirs: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="contradicts the run's settings") as refused:
        laid_over(tmp_path, theirs, sharding_stage="zero2", dtype="float32")
    assert named in str(refused.value)


def other(value: Any) -> Any:
    """A value of the same kind that is not the same."""
    if isinstance(value, bool):
        return not value
    return f"{value}x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_key_that_we_set_is_refused_by_name_where_theirs_differs(tmp_path, stage, dtype) -> None:
    leaves = [leaf for leaf in _leaves(ours(sharding_stage=stage, dtype=dtype)) if leaf[0] not in FREE]
    assert len(leaves) > 10
    for key, value in leaves:
        told: Any = other(value)
        for name in reversed(key.split(".")):
            told = {name: told}
        with pytest.raises(ValueError) as refused:
            laid_over(tmp_path, told, sharding_stage=stage, dtype=dtype)
        assert f"{key} is {other(value)!r}, ours {value!r}" in str(refused.value)


def test_what_does_not_contradict_is_taken(tmp_path: Path) -> None:
    theirs = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 1000},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "torch_adam": True}},
        "wall_clock_breakdown": True,
        "steps_per_print": 7,
        "scheduler": {},
    }
    told = laid_over(tmp_path, theirs, sharding_stage="zero2")
    assert told["train_batch_size"] == 24
    assert told["zero_optimization"]["reduce_bucket_size"] == 1000
    assert told["zero_optimization"]["offload_param"] == {"device": "none"}
    assert (told["wall_clock_breakdown"], told["steps_per_print"]) == (True, 7)
    assert "optimizer" not in told


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        laid_over(tmp_path, "{")
    with pytest.raises(ValueError, match="wanted an object, found list"):
        laid_over(tmp_path, [1])
    with pytest.raises(FileNotFoundError, match="no such file"):
        with_users_own(ours(), tmp_path / "none.json", OPTIM)
