"""Lengths in steps, tokens, epochs and fractions, compared with arithmetic."""

import pytest

from megatron.config.schema import DatasetConfig, LrSchedulerConfig
from megatron.plan.identity import trunk_identity
from megatron.plan.length import count_decay_steps, count_steps, count_warmup_steps
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from tests.plan.test_identity import SMALL

DATA = DatasetConfig(seq_len=10, batch_size=8)  # 80 tokens per step


def test_epochs_are_exact_and_no_sample_is_seen_more_often() -> None:
    for epochs, epoch_samples, n_steps in (
        (1, 80, 10),
        (1, 87, 10),  # 7 samples are skipped, so that none is read twice
        (100, 87, 1087),  # 8,700 samples: 1,087 steps of 8, 4 samples are skipped
        (0.1, 240, 3),  # 24 samples; the double 0.1 is slightly more than one tenth
        (1.5, 16, 3),
    ):
        length = LrSchedulerConfig(total_epochs=epochs)
        assert count_steps(length, DATA, epoch_samples) == n_steps
        assert epochs * epoch_samples - 8 < n_steps * 8 <= epochs * epoch_samples


def test_warm_up_and_decay_in_steps_tokens_and_fractions() -> None:
    for settings, n_steps in (
        ({}, 0),
        ({"warmup_iterations": 7}, 7),
        ({"warmup_tokens": 160}, 2),
        ({"warmup_tokens": 161}, 3),
        ({"warmup_fraction": 0.1}, 3),  # 0.1 * 30 is 3.0000000000000004 in doubles
        ({"warmup_fraction": 0.11}, 4),
    ):
        assert count_warmup_steps(LrSchedulerConfig(**settings), n_steps=30, tokens_per_step=80) == n_steps
    for settings, n_steps in (
        ({"kind": "wsd"}, 10),  # the last fifth
        ({"kind": "wsd", "decay_iterations": 3}, 3),
        ({"kind": "wsd", "decay_tokens": 400}, 5),
        ({"kind": "wsd", "decay_fraction": 0.5}, 25),
        ({"kind": "cosine"}, 0),
    ):
        assert count_decay_steps(LrSchedulerConfig(**settings), n_steps=50, tokens_per_step=80) == n_steps


def test_synthetic_tokens_need_no_file_and_no_vocabulary_and_repeat_only_on_request() -> None:
    raw = {
        "model": {"hf_config": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}},
        "dataset": {"path_train": "synthetic", "path_eval": "synthetic", "seq_len": 10, "batch_size": 8},
        "lr_scheduler": {"total_tokens": 1e3},
        "objective": {"name": "mdm"},
    }
    config = resolve_config(raw)
    assert (config.model.n_tokens, config.model.vocab_rows) == (50257, 50304)  # GPT-2's
    assert (config.model.d_head, config.model.d_ff) == (16, 128)
    assert config.objective.name == "masked_diffusion"
    plan = plan_run(config)
    assert (plan.n_steps, plan.unique_tokens) == (12, 960)
    assert plan.epochs < 1e-12
    part = plan_run(resolve_config({**raw, "dataset": {**raw["dataset"], "unique_tokens": 240}}))
    assert (part.epochs, part.unique_tokens, part.repeated_tokens) == (4.0, 240, 720)
    spelt = plan_run(resolve_config({**raw, "objective": {"name": "masked_diffusion"}}))
    assert spelt.identity == plan.identity


def test_runs_of_two_lengths_share_a_trunk_if_they_have_one_sample_order() -> None:
    for order, n_trunks in (("epoch", 1), ("megatron", 2)):
        lengths = [{"lr_scheduler": {"total_iterations": n}} for n in (10, 20)]
        data = {"dataset": {"path_train": "synthetic", "order": order}}
        configs = [resolve_config(SMALL | data | length) for length in lengths]
        assert len({trunk_identity(config) for config in configs}) == n_trunks


def test_steps_to_profile_are_steps_of_the_run() -> None:
    expected = r"logging.profile_steps: got \[3, 11\], expected steps of the run, 1 to 10"
    with pytest.raises(ValueError, match=expected):
        plan_run(resolve_config(SMALL | {"logging": {"profile_steps": [3, 11]}}))
