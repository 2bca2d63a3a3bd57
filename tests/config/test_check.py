"""Invalid values raise an error that names the key, before the run starts."""

from typing import Any

import pytest

from megatron.plan.resolve import resolve_config

RUN = {
    "model": {"d_model": 64, "n_heads": 4, "n_layers": 2, "n_tokens": 100},
    "lr_scheduler": {"total_iterations": 10},
}


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("optim", {"beta1": 1.0}, "optim.beta1: got 1.0, expected 0 or more and less than 1"),
        ("optim", {"beta2": -0.1}, "optim.beta2: got -0.1, expected 0 or more"),
        ("optim", {"weight_decay": -0.1}, "optim.weight_decay: got -0.1, expected 0 or more"),
        ("optim", {"grad_clip": -1.0}, "optim.grad_clip: got -1.0, expected 0 or more"),
        ("optim", {"grad_clip": float("nan")}, "optim.grad_clip: got nan, expected a finite number"),
        ("misc", {"seed": -1}, "misc.seed: got -1, expected 0 or more"),
        ("checkpoint", {"prefix": ""}, "checkpoint.prefix: got '', expected the first part of a file name"),
        ("checkpoint", {"prefix": "a/b"}, "Set folders with checkpoint.directory"),
        ("checkpoint", {"chkpt_at": [5, 0]}, "checkpoint.chkpt_at: got 0, expected 1 or more"),
        ("checkpoint", {"asynchronous": True}, "got checkpoint.state_dict_type=full, expected sharded"),
        (
            "dist",
            {"compile": True, "engine": "deepspeed"},
            "dist.compile=True: got dist.engine=deepspeed, expected torch",
        ),
    ],
)
def test_an_invalid_value_is_refused(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_config({**RUN, section: values})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ({"qkv_biases": True, "biases": True}, {}, "model.qkv_biases: got model.biases, which includes them"),
        ({"qk_norm_all_heads": True}, {}, "model.qk_norm_all_heads: got no model.qk_norm as well"),
        (
            {"parallel_residual": True, "norm_placement": "output"},
            {},
            "model.parallel_residual: got model.norm",
        ),
        ({"head_bias": True}, {}, "model.head_bias: got a tied embedding as well"),
        ({"mask_id": 3}, {}, "model.mask_id: belongs to masked_diffusion, but objective.name is autoreg"),
        ({"mask_id": 100}, {"name": "masked_diffusion"}, "model.mask_id: got 100, expected an id below"),
        ({"predicts_next": True}, {}, "model.predicts_next: belongs to masked_diffusion"),
        (
            {"attention_window": 4},
            {"name": "masked_diffusion"},
            "attention_window: got objective.name=masked",
        ),
        ({"attention_window": 4}, {"orders": 2}, "model.attention_window: got objective.orders above 1"),
        ({"rotary_dims": 18}, {}, "model.rotary_dims: got 18, expected an even number up to d_head 16"),
        ({"rotary_dims": 3}, {}, "model.rotary_dims: got 3, expected an even number"),
        (
            {"rotary_dims": 8, "positions": "learned"},
            {},
            "rotary_dims: has no effect without model.positions",
        ),
        ({"rope_factor": 8.0}, {}, "model.rope_factor: has no effect without model.rope_scaling"),
        ({"rope_low_factor": 2.0, "rope_scaling": "linear"}, {}, "model.rope_low_factor: has no effect"),
        ({"rope_scaling": "llama3"}, {}, "model.rope_original_positions: missing"),
        (
            {"rope_scaling": "llama3", "rope_original_positions": 8, "rope_low_factor": 4.0},
            {},
            "model.rope_low_factor: got 4.0, expected less than model.rope_high_factor 4.0",
        ),
    ],
)
def test_an_option_of_the_model_without_effect_is_refused(
    model: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        resolve_config({**RUN, "model": {**RUN["model"], **model}, "objective": more})
    assert message in str(caught.value)
