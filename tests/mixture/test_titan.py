"""TitanLoader: batches of torchtitan's form, the same on every number of ranks and after a restart."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.mixture.prepare import prepare_mixture
from megatron.mixture.source import TitanLoader, titan_config
from tests.datasets import write_dataset
from tests.mixture.conftest import register

LENGTHS = [5, 1, 40, 16, 3, 7, 30, 2, 25] * 6


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A mixture of documents of many lengths; document i has the ids 100 i, 100 i + 1, ..."""
    documents = [100 * i + np.arange(n) for i, n in enumerate(LENGTHS)]
    prefix = write_dataset(tmp_path / "one", documents)
    register(tmp_path / "c", [prefix], ())
    (tmp_path / "m.yaml").write_text("catalog: c\n")
    prepare_mixture(tmp_path / "m.yaml", quiet=True)
    return tmp_path / "m.yaml"


def load(mixture: Path, rank: int = 0, n_ranks: int = 1) -> TitanLoader:
    return TitanLoader(mixture, 16, 4 // n_ranks, rank, n_ranks, seed=3)


def test_positions_count_from_0_in_each_document_and_labels_are_the_next_tokens(mixture: Path) -> None:
    inputs, labels = next(iter(load(mixture)))
    tokens, positions = inputs["input"], inputs["positions"]
    assert tokens.shape == positions.shape == labels.shape == (4, 16)
    assert torch.equal(labels[:, :-1], tokens[:, 1:])
    follows = tokens[:, 1:] == tokens[:, :-1] + 1  # in the same document
    assert 0 < follows.sum() < follows.numel()
    assert torch.equal(positions[:, 1:], torch.where(follows, positions[:, :-1] + 1, 0))
    assert not positions[:, 0].any()


def test_a_loader_resumes_on_another_number_of_ranks(mixture: Path) -> None:
    whole = load(mixture)
    expected = [labels for _, (_, labels) in zip(range(6), whole, strict=False)]
    state: dict = {}
    for n_ranks, at in ((1, 0), (2, 2), (4, 3), (1, 5)):
        loaders = [load(mixture, rank, n_ranks) for rank in range(n_ranks)]
        for loader in loaders:
            loader.load_state_dict(state)
        batches = [next(iter(loader))[1] for loader in loaders]
        assert torch.equal(torch.cat(batches), expected[at])
        if at in (0, 3):
            next(iter(loaders[0]))
        state = loaders[0].state_dict()
    with pytest.raises(ValueError, match="seq_len: got 8, expected the saved 16"):
        TitanLoader(mixture, 8, 4, 0, 1, seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match="global_batch_size: got 6, expected a multiple of 4 x 1"):
        TitanLoader(mixture, 16, 4, 0, 1, global_batch_size=6)


def test_torchtitan_builds_a_loader_from_its_config(mixture: Path) -> None:
    name = "torchtitan.components.dataloader"
    pytest.importorskip(name, reason=f"{name} cannot be imported", exc_type=ImportError)
    sizes = {"dp_world_size": 1, "dp_rank": 0, "seq_len": 16, "local_batch_size": 4, "tokenizer": None}
    config = titan_config(mixture, seed=3)
    assert torch.equal(next(iter(config.build(**sizes)))[1], next(iter(load(mixture)))[1])
    config.dataset_path = None
    with pytest.raises(ValueError, match=r"dataloader\.dataset_path: got None"):
        config.build(**sizes)
