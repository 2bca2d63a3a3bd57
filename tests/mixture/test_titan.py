"""torchtitan's own classes with a mixture, if the package is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog import Catalog
from megatron.mixture.prepare import prepare_mixture
from megatron.mixture.source import TitanLoader, titan_config

LENGTHS = [5, 1, 40, 16, 3, 7, 30, 2, 25] * 6


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """Return a mixture of documents of many lengths; document i has the ids 100 i, 100 i + 1, ..."""
    with IndexedWriter(tmp_path / "one", np.dtype(np.uint16), {}) as writer:
        for document, n in enumerate(LENGTHS):
            writer.add_document(np.arange(n) + 100 * document)
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("one", [str(tmp_path / "one")], (), quiet=True)
    (tmp_path / "m.yaml").write_text("catalog: c\n")
    prepare_mixture(tmp_path / "m.yaml", quiet=True)
    return tmp_path / "m.yaml"


def build_loader(mixture: Path, rank: int = 0, n_ranks: int = 1) -> Any:
    """Build a loader as torchtitan's Trainer does."""
    return titan_config(mixture, seed=3).build(
        dp_world_size=n_ranks, dp_rank=rank, tokenizer=None, seq_len=16, local_batch_size=4 // n_ranks,
        snapshot_every_n_steps=None,
    )  # fmt: skip


def test_a_loader_is_built_from_torchtitans_config_and_resumes(mixture) -> None:
    name = "torchtitan.components.dataloader"
    package = pytest.importorskip(name, reason=f"{name} cannot be imported", exc_type=ImportError)
    loader = build_loader(mixture)
    assert isinstance(loader, package.BaseDataLoader)
    reading, plain = iter(loader), iter(TitanLoader(mixture, 16, 4, 0, 1, seed=3))
    for _ in range(3):
        (inputs, labels), (same, same_labels) = next(reading), next(plain)
        assert set(inputs) == {"input", "positions"}
        assert all(torch.equal(inputs[key], same[key]) for key in inputs)
        assert torch.equal(labels, same_labels)
    halves = [build_loader(mixture, rank, 2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(loader.state_dict())
    parts = [next(iter(half))[1] for half in halves]
    assert torch.equal(torch.cat(parts), next(plain)[1])
    assert titan_config(mixture).to_dict()["dataset_path"] == str(mixture)
    with pytest.raises(ValueError, match=r"dataloader\.dataset_path: got None"):
        config = titan_config(mixture)
        config.dataset_path = None
        config.build(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=16, local_batch_size=4)


def test_torchtitan_document_masks_prevent_attention_across_documents(mixture) -> None:
    name = "torchtitan.models.common.attention"
    attention = pytest.importorskip(name, reason=f"{name} cannot be imported", exc_type=ImportError)
    inputs, _ = next(iter(TitanLoader(mixture, 16, 4, 0, 1, seed=3)))
    mask = attention.get_document_mask_mod(inputs["positions"])
    documents = inputs["input"] // 100
    for row in range(4):
        for query in range(16):
            for key in range(16):
                sees = bool(mask(torch.tensor(row), torch.tensor(0), torch.tensor(query), torch.tensor(key)))
                assert sees == bool(documents[row, query] == documents[row, key])
