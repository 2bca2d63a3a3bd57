"""Training data, from the configuration to samples: orders, limits, and datasets that are refused."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from megatron.config.schema import RunConfig
from megatron.data.indexed import IndexedTokens
from megatron.data.megatron_order import MegatronSamples
from megatron.data.samples import Samples
from megatron.io import read_json
from megatron.plan.resolve import load_config, resolve_config
from megatron.plan.run_dir import RESULT
from megatron.plan.run_plan import plan_run
from megatron.train.build import open_held_out_samples, open_train_samples
from tests.datasets import write_dataset
from tests.train.conftest import read_lines

S = 32
SHAPE = {"d_model": 16, "n_heads": 2, "n_layers": 1}


def write_corpus(prefix: Path, odd: int | None = None, about: dict | None = None) -> str:
    """Write 40 documents of 25 ids below 100, one of them `odd`; no sidecar if `about` is None."""
    ids = np.random.default_rng(0).integers(0, 100, (40, 25))
    if odd is not None:
        ids.flat[757] = odd
    write_dataset(prefix, ids, about, "<i4")
    if about is None:
        Path(f"{prefix}.json").unlink()
    return str(prefix)


def config_of(path: Path | str, n_tokens: int | None = 100, **data: object) -> RunConfig:
    model = SHAPE if n_tokens is None else SHAPE | {"n_tokens": n_tokens}
    dataset = {"path_train": str(path), "seq_len": 10, "batch_size": 4, **data}
    return resolve_config({"model": model, "lr_scheduler": {"total_iterations": 5}, "dataset": dataset})


@pytest.mark.parametrize("odd", [100, 70_000, -1])
def test_an_id_past_the_vocabulary_is_named(tmp_path: Path, odd: int) -> None:
    for order, about in product(("epoch", "megatron"), (None, {"tokenizer": {"n_tokens": 100}})):
        prefix = write_corpus(tmp_path / "odd", odd, about)
        good = write_corpus(tmp_path / "good", None, about)
        listed = tmp_path / "blend.txt"
        listed.write_text(f"1 {good}\n1 {prefix}\n")
        expected = rf"odd: got id {odd}, expected 0 to 99 \(model.n_tokens=100\)"
        for path in (prefix, listed):
            samples = open_train_samples(config_of(path, order=order), 400)
            with pytest.raises(ValueError, match=expected):
                samples.take(np.arange(400))
            with pytest.raises(ValueError, match=expected):
                _ = [samples[i] for i in range(400)]
            held_out = open_held_out_samples(str(path), config_of(path, path_eval=str(path)))
            with pytest.raises(ValueError, match=expected):
                held_out.take(np.arange(held_out.samples_per_epoch))
        assert open_train_samples(config_of(good, order=order), 400).take(np.arange(400)).max() < 100


def test_sidecars_that_miss_or_contradict_are_named(tmp_path: Path) -> None:
    foreign = write_corpus(tmp_path / "foreign")
    with pytest.raises(ValueError, match=f"{foreign} has no sidecar .*model.n_tokens=50257"):
        config_of(foreign, n_tokens=None)
    assert plan_run(config_of(foreign)).warnings == ()
    prefix = write_corpus(tmp_path / "x", None, {"tokenizer": {"n_tokens": 100}})
    content = read_json(Path(f"{prefix}.json"))
    Path(f"{prefix}.json").write_text(json.dumps(content | {"tokens": 9999}))
    with pytest.raises(ValueError, match="x.json: got 9,999 tokens, expected 1,000 as in its .idx"):
        open_train_samples(config_of(prefix), 90)


def test_mixed_ends_of_documents_need_a_key(tmp_path: Path) -> None:
    def write(name: str, eod_id: int, append_eod: bool = True) -> str:
        tokenizer = {"n_tokens": 100, "sha256": "same", "eod_id": eod_id}
        return write_corpus(tmp_path / name, None, {"append_eod": append_eod, "tokenizer": tokenizer})

    first, two, none = write("one", 1), write("two", 2), write("none", 1, append_eod=False)
    foreign = write_corpus(tmp_path / "foreign")
    listed = tmp_path / "blend.txt"
    for other, use in ((two, "end-of-document id 2"), (none, "no end-of-document token")):
        listed.write_text(f"1 {first}\n1 {other}\n")
        expected = f"{other}: got {use}, expected end-of-document id 1 .*mixed_eod=true"
        with pytest.raises(ValueError, match=expected):
            plan_run(config_of(listed))
        plan = plan_run(config_of(listed, mixed_eod=True))
        assert len(plan.warnings) == 1 and plan.as_dict()["warnings"] == plan.warnings
        assert plan_run(config_of(first, path_eval=other)).warnings[0].startswith("dataset.path_eval: ")
    listed.write_text(f"1 {first}\n1 {foreign}\n")
    (warning,) = plan_run(config_of(listed)).warnings
    assert warning.startswith(f"{foreign}: no sidecar")
    assert plan_run(config_of(first)).identity == plan_run(config_of(first, mixed_eod=False)).identity


@pytest.fixture
def small_config(words: list[str], config_file: Path) -> Callable[..., RunConfig]:
    """Return a function: more arguments -> configuration of the small run."""
    return lambda *more: load_config(config_file, [*words, "model.n_tokens=200", *more])


def test_training_samples_have_the_configured_order(small_config, corpus: Path) -> None:
    tokens, numbers = IndexedTokens(corpus / "train"), np.arange(24 * 12)
    expected = {
        "epoch": Samples(tokens, S, seed=7),
        "megatron": MegatronSamples(tokens, S, seed=7, n_samples=24 * 12),
    }
    identities = set()
    for order, samples in expected.items():
        config = small_config("misc.seed=7", f"dataset.order={order}")
        plan = plan_run(config)
        identities.add(plan.identity)
        training = open_train_samples(config, plan.n_steps * config.dataset.batch_size)
        np.testing.assert_array_equal(training.take(numbers), samples.take(numbers))
    assert len(identities) == 2, "two orders are two runs"


def test_every_epoch_contains_the_limited_windows_once(small_config, corpus) -> None:
    # ten windows: nine contain one token too few
    samples = open_train_samples(small_config(f"dataset.unique_tokens={9 * S + 1}"), 12 * 24)
    assert samples.samples_per_epoch == 10
    tokens = IndexedTokens(corpus / "train").tokens
    windows = {tuple(tokens[w * S : (w + 1) * S + 1].tolist()) for w in range(10)}
    epochs = [[tuple(samples[e * 10 + i].tolist()) for i in range(10)] for e in range(3)]
    assert all(set(epoch) == windows for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_length_in_epochs_is_of_the_part(small_config) -> None:
    # the part of two batches is seen three times
    words = (f"dataset.unique_tokens={48 * S}", "lr_scheduler.total_iterations=null")
    assert plan_run(small_config(*words, "lr_scheduler.total_epochs=3")).n_steps == 6
    # the part changes the identity only if it is given
    plans = [plan_run(small_config(*part)) for part in (words[:1], ())]
    assert len({plan.identity for plan in plans}) == len({plan.trunk_identity for plan in plans}) == 2


def test_limited_corpora_of_a_blend_repeat_together(small_config, corpus, tmp_path) -> None:
    (tmp_path / "two.txt").write_text(f"0.75 {corpus / 'train'}\n0.25 {corpus / 'held_out'}\n")
    config = small_config(f"dataset.path_train={tmp_path / 'two.txt'}", f"dataset.unique_tokens={48 * S}")
    first, second = plan_run(config).corpora
    assert (first.tokens, second.tokens) == (36 * S, 12 * S)
    assert (first.epochs, second.epochs) == (6.0, 6.0)
    seen = open_train_samples(config, 12 * 24).take(np.arange(12 * 24))
    assert len(np.unique(seen, axis=0)) == 48


def test_data_that_cannot_be_limited_is_refused(small_config) -> None:
    for more, sentence in (
        ("dataset.unique_tokens=1e6", "Set fewer, or preprocess more"),
        ("dataset.order=megatron", "got dataset.order=megatron, expected epoch"),
    ):
        with pytest.raises(ValueError, match=f"dataset.unique_tokens: .*{sentence}"):
            plan_run(small_config("dataset.unique_tokens=1000", more))


def test_a_run_logs_its_part_and_epochs(pretrain, tmp_path) -> None:
    pretrain(tmp_path, f"dataset.unique_tokens={48 * S}")
    last = read_lines(tmp_path)[-1]
    # 12 steps of 24 samples over 48 unique ones
    assert (last["epoch"], last["unique_tokens"], last["repeated_tokens"]) == (6.0, 48 * S, 5 * 48 * S)
    result = read_json(tmp_path / RESULT)
    assert plan_run(resolve_config(result["config"])).identity == result["identity"]
