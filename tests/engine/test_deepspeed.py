"""DeepSpeed's JSON, conflicts with a user's JSON, its loss scale, and runs without DeepSpeed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.schema import DistConfig, OptimConfig
from megatron.engine.deepspeed.deepspeed_config import (
    OVERRIDABLE,
    OWNED_SECTIONS,
    _iterate_leaves,
    build_deepspeed_config,
    merge_user_config,
)
from megatron.engine.deepspeed.deepspeed_state import get_loss_scale, set_loss_scale

OPTIM = OptimConfig(lr=1e-3, grad_clip=0.5)


def build_config(**dist: Any) -> dict[str, Any]:
    return build_deepspeed_config(DistConfig(engine="deepspeed", **dist), OPTIM, 4, 2, 3)


def merge_config(tmp_path: Path, theirs: Any, **dist: Any) -> dict[str, Any]:
    path = tmp_path / "theirs.json"
    path.write_text(theirs if isinstance(theirs, str) else json.dumps(theirs))
    return merge_user_config(build_config(**dist), path, OPTIM)


@pytest.mark.parametrize(("dtype", "section"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_half_precision_keeps_float32_weights(dtype: str, section: str) -> None:
    assert build_config(dtype=dtype, sharding_stage="zero1")[section]["enabled"]
    whole = build_config(dtype=dtype)
    assert not whole[section]["enabled"]
    assert whole["torch_autocast"]["enabled"]
    assert whole["communication_data_type"] == "fp32"


CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"bfloat16": {"enabled": True}}, "bf16.enabled: got True, expected False"),
    ({"optimizer": {"type": "Lamb"}}, "optimizer.type: got 'Lamb', expected 'AdamW'"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 2}}}, "optimizer.params.lr: got 2, expected 0.001"),
    ({"zero_optimization": {"cpu_offload": True}}, "cpu_offload: got True, expected False"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op: got 'sum', expected 'mean'"),
    ({"zero_optimization": 3}, "zero_optimization: got 3, expected a section of keys"),
    ({"train_batch_size": {"of": 24}}, "train_batch_size.of: got 24, expected no section"),
    ({"train_batch_szie": 24}, "unknown key train_batch_szie, did you mean train_batch_size?"),
    ({"optimizer": "AdamW"}, "optimizer: got 'AdamW', expected a section with type and params"),
    ({"optimizer": {"params": 3}}, "expected a section with type and params"),
    ({"optimizer": {"params": {"amsgrad": True}}}, "optimizer.params.amsgrad: got True, expected False"),
]


@pytest.mark.parametrize(("theirs", "named"), CONFLICTS)
def test_a_conflict_is_refused_with_both_values(theirs: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="conflicts with the run's settings") as refused:
        merge_config(tmp_path, theirs, sharding_stage="zero2", dtype="float32")
    assert named in str(refused.value)


def test_every_section_that_the_run_configures_names_its_key(tmp_path: Path) -> None:
    assert {"scheduler", "elasticity", "pipeline", "activation_checkpointing"} <= OWNED_SECTIONS.keys()
    for section, key in OWNED_SECTIONS.items():
        with pytest.raises(ValueError, match=f"{section}: set {key} instead"):
            merge_config(tmp_path, {section: {"enabled": True}})
        assert section not in merge_config(tmp_path, {section: {"enabled": False}})


def change_value(value: Any) -> Any:
    """Return a different value of the same type."""
    if isinstance(value, bool):
        return not value
    return f"{value}x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("stage", ["zero0", "zero3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_generated_key_has_the_value_of_the_run(tmp_path, stage, dtype) -> None:
    leaves = list(_iterate_leaves(build_config(sharding_stage=stage, dtype=dtype)))
    # at stage 0 these two say in DeepSpeed's words what the run does by autocast
    equal = {"bfloat16": "bf16.enabled", "float16": "fp16.enabled"}.get(dtype) if stage == "zero0" else None
    assert len(leaves) > 10 + len(OVERRIDABLE)
    for key, value in leaves:
        if key in {*OVERRIDABLE, equal}:
            continue
        user: Any = change_value(value)
        for name in reversed(key.split(".")):
            user = {name: user}
        with pytest.raises(ValueError) as refused:
            merge_config(tmp_path, user, sharding_stage=stage, dtype=dtype)
        assert f"{key}: got {change_value(value)!r}, expected {value!r}" in str(refused.value)


def test_the_json_of_the_data_constrained_study_is_accepted(tmp_path: Path) -> None:
    theirs = {
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 24, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }  # fmt: skip
    config = merge_config(tmp_path, theirs, dtype="bfloat16")
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert config["torch_autocast"] == autocast
    assert (config["bf16"]["enabled"], config["steps_per_print"]) == (False, 2000)
    # its JSON for several nodes: offload at stage 1, where DeepSpeed ignores offload_param
    cpu = {"device": "cpu", "pin_memory": True}
    theirs["zero_optimization"] = {
        "stage": 1, "offload_optimizer": cpu, "offload_param": cpu, "contiguous_gradients": True,
        "overlap_comm": True,
    }  # fmt: skip
    config = merge_config(tmp_path, theirs, dtype="bfloat16", sharding_stage="zero1", offload_optimizer=True)
    zero = config["zero_optimization"]
    assert (zero["offload_optimizer"], zero["offload_param"]) == (cpu, {"device": "none"})
    assert zero["overlap_comm"] and config["bf16"]["enabled"]


def test_auto_values_are_those_of_the_run(tmp_path) -> None:
    adamw = {"lr": "auto", "betas": [0.9, 0.95], "eps": "auto", "torch_adam": True}
    theirs = {
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": adamw},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": "auto", "sub_group_size": 1e9, "overlap_comm": False,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": 3, "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": True, "steps_per_print": 7,
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
    }  # fmt: skip
    config = merge_config(tmp_path, theirs, dtype="bfloat16", sharding_stage="zero3")
    ours = build_config(dtype="bfloat16", sharding_stage="zero3")
    assert '"auto"' not in json.dumps(config)
    assert not {"scheduler", "optimizer", "activation_checkpointing"} & set(config)
    assert all(config[key] == ours[key] for key in ("bf16", "train_batch_size", "gradient_clipping"))
    assert config["zero_optimization"]["offload_param"] == {"device": "none"}
    assert (config["wall_clock_breakdown"], config["steps_per_print"]) == (True, 7)
    assert config["zero_optimization"]["sub_group_size"] == 1e9
    theirs["scheduler"] = {}
    assert "scheduler" not in merge_config(tmp_path, theirs, dtype="bfloat16", sharding_stage="zero3")
    theirs["scheduler"]["params"] = {"warmup_num_steps": 10}
    with pytest.raises(ValueError, match="scheduler: set lr_scheduler instead"):
        merge_config(tmp_path, theirs, dtype="bfloat16", sharding_stage="zero3")


def test_bad_files_give_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        merge_config(tmp_path, "{")
    with pytest.raises(ValueError, match="got list, expected a JSON object"):
        merge_config(tmp_path, [1])
    with pytest.raises(FileNotFoundError, match="no such file"):
        merge_user_config(build_config(), tmp_path / "none.json", OPTIM)


def build_stage_0() -> Any:
    return SimpleNamespace(torch_autocast_z0_gradscaler=torch.amp.GradScaler(device="cpu"), optimizer=None)


def build_stage_1() -> Any:
    pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(2.0**16, 1000, 1, 1, False)
    return SimpleNamespace(torch_autocast_z0_gradscaler=None, optimizer=SimpleNamespace(loss_scaler=scaler))


@pytest.mark.parametrize("build", [build_stage_0, build_stage_1])
def test_scale_and_good_steps_are_restored(build) -> None:
    engine = build()
    assert float(get_loss_scale(engine)["scale"]) == 2.0**16
    state = {"scale": torch.tensor(512.0), "good_steps": torch.tensor(7, dtype=torch.int32)}
    set_loss_scale(engine, state)
    restored = get_loss_scale(engine)
    assert (float(restored["scale"]), int(restored["good_steps"])) == (512.0, 7)


def test_good_steps_continue_to_the_next_doubling() -> None:
    engine = build_stage_1()
    scaler = engine.optimizer.loss_scaler
    set_loss_scale(engine, {"scale": torch.tensor(512.0), "good_steps": torch.tensor(999)})
    scaler.update_scale(False)
    assert (scaler.cur_scale, int(get_loss_scale(engine)["good_steps"])) == (512.0, 1000)
    scaler.update_scale(False)
    assert scaler.cur_scale == 1024.0


def test_without_scaling_the_state_is_none() -> None:
    engine = SimpleNamespace(torch_autocast_z0_gradscaler=None, optimizer=torch.optim.SGD([torch.zeros(1)]))
    assert get_loss_scale(engine) is None
