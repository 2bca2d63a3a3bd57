"""Runs initialized from the weights of another model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.convert.formats import convert_checkpoint
from megatron.checkpoint.model_weights import load_weights
from megatron.data.indexed import IndexedTokens
from megatron.data.samples import Samples
from megatron.io import read_json
from megatron.tokenizer.bpe import load_hf_tokenizer
from tests.datasets import write_dataset
from tests.train.conftest import COMMON, MDM, read_losses

STORY = (
    "Once upon a time, there was a little boy named Tim. Tim had a red ball. He liked to play with his ball "
    "in the park. One day, the ball rolled under a big tree. Tim was sad. He asked his mom to help him. "
)


@pytest.fixture(scope="module")
def stories(stories_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with the tokens of the stories model, and the model as a native checkpoint."""
    folder = tmp_path_factory.mktemp("stories")
    tokenizer = load_hf_tokenizer(str(stories_folder))
    document = [*tokenizer.encode(STORY), tokenizer.eod_id]
    write_dataset(folder / "text", [document] * 8, {"tokenizer": {"n_tokens": 512}})
    convert_checkpoint(stories_folder, folder / "native", to="native")
    return folder


@pytest.fixture(scope="module")
def config_file(stories: Path) -> Path:
    """Return the configuration that the conversion wrote."""
    return stories / "native" / "start.yaml"


@pytest.fixture(scope="module")
def words(stories: Path) -> list[str]:
    """Further arguments of a run of two steps."""
    return [
        *COMMON, f"dataset.path_train={stories / 'text'}", "dataset.seq_len=64", "dataset.batch_size=4",
        "lr_scheduler.total_iterations=2", "optim.lr=1e-3",
    ]  # fmt: skip


def test_the_first_loss_is_that_of_the_imported_model(pretrain, stories, tmp_path) -> None:
    pretrain(tmp_path)
    model = load_weights(stories / "native").build_model()
    samples = Samples(IndexedTokens(stories / "text"), 64, 0)
    tokens = torch.from_numpy(np.stack([samples[i] for i in range(4)]))
    logits = model(tokens[:, :-1], causal=True)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert read_losses(tmp_path)[0] == pytest.approx(expected, abs=1e-5)
    assert expected < 2.0  # an untrained model has a loss of log 512 = 6.2
    result = read_json(tmp_path / "result.json")
    assert result["config"]["checkpoint"]["init_from"] == str(stories / "native")


def test_a_diffusion_run_may_start_from_it(pretrain, tmp_path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    changes = [MDM, "model.vocab_rows=640"]
    pretrain(run, *changes)
    pretrain(other, *changes, "checkpoint.init_from=null")
    plans = [read_json(folder / "plan.json") for folder in (run, other)]
    assert plans[0]["identity"] != plans[1]["identity"]
    assert read_losses(run)[0] != read_losses(other)[0]


def test_weights_of_another_model_are_refused(pretrain, tmp_path) -> None:
    for change, sentence in (
        ("model.n_layers=4", "model.n_layers is 4, in the checkpoint 5"),
        ("checkpoint.init_from=nowhere", "nowhere: no such checkpoint"),
    ):
        failed = pretrain(tmp_path / "run", change, status=1)
        assert failed.error.count("\n") == 1 and sentence in failed.error
        assert not (tmp_path / "run").exists()
