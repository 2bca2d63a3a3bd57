"""Identities of runs: identities from earlier versions stay, and a change of the losses changes them."""

from dataclasses import fields
from typing import Any

import pytest

from megatron.config.schema import RunConfig
from megatron.plan.identity import run_identity, trunk_identity
from megatron.plan.resolve import resolve_config

SMALL: dict[str, Any] = {
    "model": {"d_model": 64, "n_heads": 4, "n_layers": 2, "n_tokens": 100},
    "dataset": {"path_train": "synthetic"},
    "lr_scheduler": {"total_iterations": 10},
}
# computed by the version in which plan/identity.py listed the keys: folders of finished runs have these names
IDENTITIES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "2619d9b6409f6889", "a5d7314ab03566b7"),
    ({"model": {"qk_norm": True, "size": "label"}, "optim": {"kernel": "apex"}},
     "3ae165e0e1ad96d7", "b50456b12856b271"),
    ({"dist": {"float8": True}}, "fbdccf16c0d9b088", "c1996badc4487c9b"),
    ({"dist": {"dtype": "float32", "tensor_parallel": 2}, "misc": {"seed": 3}},
     "cd00f32651e88aa8", "f66ecb90086a96ed"),
    ({"dataset": {"order": "megatron", "seq_len": 128, "mixed_eod": True}},
     "97d3549e88c5aac7", "24e21da8e7f5db0f"),
    ({"dataset": {"unique_tokens": 4096, "path_eval": "synthetic"},
      "evaluation": {"num_mc": 2, "batch_size": 1}},
     "ec93cc24e3e1e1ec", "6a533db64760778d"),
    ({"objective": {"name": "mdm", "t_draw": "stratified"},
      "checkpoint": {"init_from": "no/such/checkpoint", "keep_last": 7}},
     "55eee5881033277b", "5883261d609c639a"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "run", "trunk"), IDENTITIES)
def test_the_identities_of_an_earlier_version_are_valid(
    changes: dict[str, Any], run: str, trunk: str
) -> None:
    # the residual stream of these versions was float32
    changes = changes | {"dist": {"residual_dtype": "float32"} | changes.get("dist", {})}
    config = resolve_config({name: SMALL.get(name, {}) | changes.get(name, {}) for name in SMALL | changes})
    assert (run_identity(config)[:16], trunk_identity(config)[:16]) == (run, trunk)


def test_a_stream_in_half_precision_is_another_run_and_one_in_float32_is_not() -> None:
    identities = {
        (dtype, residual): run_identity(resolve_config({**SMALL, "dist": dist}))
        for dtype in ("float32", "bfloat16")
        for residual in (None, "float32")
        for dist in [{"dtype": dtype, "residual_dtype": residual}]
    }
    assert identities["float32", None] == identities["float32", "float32"]
    assert identities["bfloat16", None] != identities["bfloat16", "float32"]


def test_every_setting_of_the_model_and_its_training_has_an_identity() -> None:
    sections = {f.name: f.type for f in fields(RunConfig)}
    without = {
        f"{name}.{key.name}"
        for name in ("model", "objective", "optim", "lr_scheduler")
        for key in fields(sections[name])
        if key.metadata["identity"] is None
    }
    # a label, a number that vocab_rows replaces, and another implementation of the same update
    assert without == {"model.size", "model.vocab_multiple", "optim.kernel"}
