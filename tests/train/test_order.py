"""The key dataset.order, from the configuration to a run."""

from pathlib import Path

import numpy as np

from megatron.data.indexed import IndexedTokens
from megatron.data.megatron_order import MegatronSamples
from megatron.data.samples import Samples
from megatron.plan.resolve import load_config
from megatron.plan.run_plan import plan_run
from megatron.train.build import open_train_samples


def test_training_samples_have_the_configured_order(words: list[str], corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("name: test\n")
    tokens, numbers = IndexedTokens(corpus / "train"), np.arange(24 * 12)
    expected = {
        "epoch": Samples(tokens, 32, seed=7),
        "megatron": MegatronSamples(tokens, 32, seed=7, n_samples=24 * 12),
    }
    names = set()
    for order, samples in expected.items():
        config = load_config(
            tmp_path / "empty.yaml", [*words, "misc.seed=7", f"dataset.order={order}", "model.n_tokens=200"]
        )
        plan = plan_run(config)
        names.add(plan.identity)
        training = open_train_samples(config, plan.n_steps * config.dataset.batch_size)
        np.testing.assert_array_equal(training.take(numbers), samples.take(numbers))
    assert len(names) == 2, "two orders are two runs"
