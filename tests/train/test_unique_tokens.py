"""The key dataset.unique_tokens: training on the first part of a corpus."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.config.schema import RunConfig
from megatron.data.indexed import IndexedTokens
from megatron.plan.resolve import load_config, resolve_config
from megatron.plan.run_dir import RESULT, read_metrics
from megatron.plan.run_plan import plan_run
from megatron.train.build import open_train_samples

S = 32


@pytest.fixture
def config_of(words: list[str], tmp_path: Path):
    """Return a function: more arguments -> configuration of the small run."""
    (tmp_path / "empty.yaml").write_text("name: test\n")

    def read(*more: str) -> RunConfig:
        return load_config(tmp_path / "empty.yaml", [*words, "model.n_tokens=200", *more])

    return read


def test_every_epoch_contains_the_first_windows_up_to_the_limit_once(config_of, corpus) -> None:
    config = config_of(f"dataset.unique_tokens={9 * S + 1}")  # ten windows: nine contain one token too few
    samples = open_train_samples(config, 12 * 24)
    assert samples.samples_per_epoch == 10
    tokens = IndexedTokens(corpus / "train").tokens
    windows = {tuple(tokens[w * S : (w + 1) * S + 1].tolist()) for w in range(10)}
    epochs = [[tuple(samples[e * 10 + i].tolist()) for i in range(10)] for e in range(3)]
    assert all(set(epoch) == windows for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_plan_counts_epochs_and_repetitions_of_the_part(config_of) -> None:
    plan = plan_run(config_of(f"dataset.unique_tokens={48 * S}"))
    # 12 steps of 24 samples over 48 unique ones
    assert (plan.epochs, plan.unique_tokens, plan.repeated_tokens) == (6.0, 48 * S, 5 * 48 * S)
    epochs = ["lr_scheduler.total_iterations=null", "lr_scheduler.total_epochs=3"]
    assert plan_run(config_of(f"dataset.unique_tokens={48 * S}", *epochs)).n_steps == 6


def test_the_part_changes_the_identity_only_if_it_is_given(config_of) -> None:
    plans = [plan_run(config_of(*more)) for more in ((), ("dataset.unique_tokens=1000",))]
    assert len({plan.identity for plan in plans}) == len({plan.trunk_identity for plan in plans}) == 2


def test_corpora_of_a_blend_contribute_their_share_and_repeat_together(config_of, corpus, tmp_path) -> None:
    (tmp_path / "two.txt").write_text(f"0.75 {corpus / 'train'}\n0.25 {corpus / 'held_out'}\n")
    more = [f"dataset.path_train={tmp_path / 'two.txt'}", f"dataset.unique_tokens={48 * S}"]
    config = config_of(*more)
    first, second = plan_run(config).corpora
    assert (first.tokens, second.tokens) == (36 * S, 12 * S)
    assert (first.epochs, second.epochs) == (6.0, 6.0)
    samples = open_train_samples(config, 12 * 24)
    seen = samples.take(np.arange(12 * 24))
    assert len(np.unique(seen, axis=0)) == 48


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("dataset.unique_tokens=1e6", "Set fewer, or preprocess more"),
        ("dataset.order=megatron", "got dataset.order=megatron, expected epoch"),
    ],
)
def test_data_that_cannot_be_limited_is_refused(config_of, more: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"dataset.unique_tokens: .*{sentence}"):
        plan_run(config_of("dataset.unique_tokens=1000", more))


def test_a_run_logs_the_part_and_its_epochs_and_its_written_configuration_is_read_back(
    pretrain, words, tmp_path
) -> None:
    run = tmp_path / "run"
    done = pretrain([*words, f"dataset.unique_tokens={48 * S}", f"logging.run_dir={run}"])
    assert done.returncode == 0, done.stderr
    last = [line for line in read_metrics(run) if line["kind"] == "train"][-1]
    assert (last["epoch"], last["unique_tokens"], last["repeated_tokens"]) == (6.0, 48 * S, 5 * 48 * S)
    result = json.loads((run / RESULT).read_text())
    assert plan_run(resolve_config(result["config"])).identity == result["identity"]
