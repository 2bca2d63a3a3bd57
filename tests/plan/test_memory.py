"""Every named size has a default microbatch that fits an 80 GB device by the estimate, or a sentence."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.config.presets import load_model_sizes
from megatron.plan.memory import MEMORY_SHARE, choose_rows, estimate_memory
from megatron.plan.resolve import resolve_config

DEVICE = 80e9
POWERS = [256 >> i for i in range(9)]  # divisors of the default batch of 256 samples


def make_config(size: str, objective: str = "autoregressive", **dist: Any):
    raw = {"model": {"size": size, "n_tokens": 50257}, "objective": {"name": objective}, "dist": dist}
    return resolve_config(raw | {"lr_scheduler": {"total_iterations": 1}})


@pytest.mark.parametrize("objective", ["autoregressive", "masked_diffusion"])
def test_no_default_of_a_named_size_exceeds_80_gb_by_the_estimate(objective: str) -> None:
    unfitting = []
    for size in load_model_sizes():
        config = make_config(size, objective)
        assert (config.dataset.batch_size, config.dataset.seq_len) == (256, 2048)
        rows, warning = choose_rows(config, 1, POWERS, DEVICE)
        if warning is not None:
            unfitting.append(size)
            assert rows == 1
            assert "Shard it over more ranks (dist.sharding_stage=zero3)" in warning
        else:
            assert estimate_memory(config, 1, rows) <= MEMORY_SHARE * DEVICE < DEVICE
            # no larger one fits
            assert rows == 256 or estimate_memory(config, 1, 2 * rows) > MEMORY_SHARE * DEVICE
    # 18 bytes of states a parameter: 3.5 billion parameters fill 63 GB of the 68 GB allowed
    assert [size for size in load_model_sizes() if int(size[:-1]) > 3500] == unfitting


def test_sharding_and_recomputation_make_the_largest_size_fit() -> None:
    largest = list(load_model_sizes())[-1]
    config = make_config(largest, sharding_stage="zero3", activation_checkpointing="full")
    assert choose_rows(config, 1, POWERS, DEVICE)[1] is not None
    rows, warning = choose_rows(config, 64, [4, 2, 1], DEVICE)
    assert (warning, rows >= 1) == (None, True)


def test_a_small_model_takes_all_samples_of_the_rank() -> None:
    assert choose_rows(make_config("7M"), 1, POWERS, DEVICE) == (256, None)


def test_compiled_blocks_allow_more_samples() -> None:
    config = make_config("425M")
    eager, compiled = (choose_rows(config, 1, POWERS, DEVICE, flag)[0] for flag in (False, True))
    assert compiled >= eager
    assert estimate_memory(config, 1, 8, True) < estimate_memory(config, 1, 8, False)


def test_tensor_and_context_ranks_divide_states_and_activations() -> None:
    config = make_config("1143M")
    cut = replace(config, dist=replace(config.dist, tensor_parallel=2, context_parallel=2))
    assert estimate_memory(cut, 4, 8) < 0.55 * estimate_memory(config, 1, 8)
