"""The key dataset.order, from the configuration to a run."""

import shutil
from pathlib import Path

import numpy as np

from megatron.checkpoint import layout
from megatron.data.indexed import IndexedTokens
from megatron.data.megatron_order import MegatronSamples
from megatron.data.samples import Samples
from megatron.plan.resolve import load_config
from megatron.plan.run_dir import read_metrics
from megatron.plan.run_plan import plan_run
from megatron.train.build import open_train_samples


def read_losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if line["kind"] == "train"]


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


def test_a_run_in_megatrons_order_resumes_bit_equal(pretrain, words: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*words, "dataset.order=megatron", "checkpoint.chkpt_saving_iterations=7"]
    done = pretrain([*words, f"logging.run_dir={run}"])
    assert done.returncode == 0, done.stderr
    whole = read_losses(run)
    # as if killed after step 7: the last checkpoint and the result are not there yet
    shutil.rmtree(layout.find_checkpoints(run / "checkpoints", "step")[1].path)
    (run / "result.json").unlink()
    resumed = pretrain([*words, f"logging.run_dir={run}"])
    assert "resuming after step 7" in resumed.stderr
    assert read_losses(run) == whole
    assert len(whole) == 12
