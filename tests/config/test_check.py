"""Values that mean nothing are refused by name, before anything starts."""

from typing import Any

import pytest

from megatron.config.read import build_config

RUN = {
    "model": {"d_model": 64, "n_heads": 4, "n_layers": 2, "n_tokens": 100},
    "lr_scheduler": {"total_iterations": 10},
}


@pytest.mark.parametrize(
    ("section", "told", "sentence"),
    [
        ("optim", {"beta1": 1.0}, "optim.beta1: found 1.0, wanted 0 or more and less than 1"),
        ("optim", {"beta2": -0.1}, "optim.beta2: found -0.1, wanted 0 or more"),
        ("optim", {"weight_decay": -0.1}, "optim.weight_decay: found -0.1, wanted 0 or more"),
        ("optim", {"grad_clip": -1.0}, "optim.grad_clip: found -1.0, wanted 0 or more"),
        ("optim", {"grad_clip": float("nan")}, "optim.grad_clip: got nan, expected a finite number"),
        ("misc", {"seed": -1}, "misc.seed: found -1, wanted 0 or more"),
        ("checkpoint", {"prefix": ""}, "checkpoint.prefix: found '', wanted the first part of a name"),
        ("checkpoint", {"prefix": "a/b"}, "folders are for checkpoint.directory"),
        ("checkpoint", {"chkpt_at": [5, 0]}, "checkpoint.chkpt_at: found 0, steps are counted from 1"),
        ("checkpoint", {"asynchronous": True}, "wants checkpoint.state_dict_type=sharded, found full"),
        ("dist", {"compile": True, "engine": "deepspeed"}, "dist.compile=True: wants dist.engine=torch"),
    ],
)
def test_a_value_that_means_nothing_is_refused(section: str, told: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        build_config({**RUN, section: told})
    assert sentence in str(caught.value)
