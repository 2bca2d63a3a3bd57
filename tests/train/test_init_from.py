"""Runs initialized from the weights of another model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.convert.formats import convert_checkpoint
from megatron.checkpoint.model_weights import load_weights
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.samples import Samples
from megatron.plan.run_dir import read_metrics
from megatron.tokenizer.bpe import load_hf_tokenizer

STORY = (
    "Once upon a time, there was a little boy named Tim. Tim had a red ball. He liked to play with his ball "
    "in the park. One day, the ball rolled under a big tree. Tim was sad. He asked his mom to help him. "
)


def first_loss(run: Path) -> float:
    return next(line["loss"] for line in read_metrics(run) if line["kind"] == "train")


@pytest.fixture(scope="module")
def stories(stories_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with the tokens of the stories model, and the model as a native checkpoint."""
    folder = tmp_path_factory.mktemp("stories")
    tokenizer = load_hf_tokenizer(str(stories_folder))
    with IndexedWriter(folder / "text", np.dtype(np.uint16), {"tokenizer": {"n_tokens": 512}}) as writer:
        for _ in range(8):
            writer.add_document(np.array([*tokenizer.encode(STORY), tokenizer.eod_id]))
    convert_checkpoint(stories_folder, folder / "native", to="native")
    return folder


@pytest.fixture
def words(stories: Path, tmp_path: Path) -> list[str]:
    return [
        f"dataset.path_train={stories / 'text'}",
        f"logging.run_dir={tmp_path / 'run'}",
        "dataset.seq_len=64",
        "dataset.batch_size=4",
        "dist.dtype=float32",
        "dist.cpu_only=true",
        "lr_scheduler.total_iterations=2",
        "optim.lr=1e-3",
        "logging.every_iterations=1",
        "logging.tensorboard=false",
        "misc.n_threads=1",
    ]


def read_start_words(stories: Path) -> list[str]:
    """Return the keys of start.yaml as arguments; the fixture `pretrain` uses another file."""
    from omegaconf import OmegaConf

    sections = OmegaConf.to_container(OmegaConf.load(stories / "native" / "start.yaml"))
    return [f"{section}.{key}={value}" for section, keys in sections.items() for key, value in keys.items()]


def test_the_first_loss_is_that_of_the_imported_model(pretrain, words, stories, tmp_path) -> None:
    done = pretrain([*read_start_words(stories), *words])
    assert done.returncode == 0, done.stderr
    model = load_weights(stories / "native").build_model()
    samples = Samples(IndexedTokens(stories / "text"), 64, 0)
    tokens = torch.from_numpy(np.stack([samples[i] for i in range(4)]))
    logits = model(tokens[:, :-1], causal=True)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert first_loss(tmp_path / "run") == pytest.approx(expected, abs=1e-5)
    assert expected < 2.0  # an untrained model has a loss of log 512 = 6.2
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["config"]["checkpoint"]["init_from"] == str(stories / "native")


def test_a_diffusion_run_may_start_from_it_with_another_number_of_rows(
    pretrain, words, stories, tmp_path
) -> None:
    more = ["objective.name=masked_diffusion", "model.vocab_rows=640"]
    done = pretrain([*read_start_words(stories), *words, *more])
    assert done.returncode == 0, done.stderr
    alone = pretrain(
        [
            *read_start_words(stories),
            *words,
            *more,
            "checkpoint.init_from=null",
            f"logging.run_dir={tmp_path / 'other'}",
        ]
    )
    assert alone.returncode == 0, alone.stderr
    first, other = (json.loads((tmp_path / run / "plan.json").read_text()) for run in ("run", "other"))
    assert first["identity"] != other["identity"]
    assert first_loss(tmp_path / "run") != first_loss(tmp_path / "other")


@pytest.mark.slow
def test_weights_of_another_model_are_refused_with_a_one_line_error(
    pretrain, words, stories, tmp_path
) -> None:
    for word, sentence in (
        ("model.n_layers=4", "model.n_layers is 4, in the checkpoint 5"),
        ("checkpoint.init_from=nowhere", "nowhere: no such checkpoint"),
    ):
        failed = pretrain([*read_start_words(stories), *words, word])
        assert (failed.returncode, failed.stderr.count("\n")) == (1, 1), failed.stderr
        assert sentence in failed.stderr
        assert not (tmp_path / "run").exists()
