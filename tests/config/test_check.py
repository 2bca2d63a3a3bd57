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
