"""A run on a dataset of parts is the run on the merged dataset: its identity, plan and samples."""

from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedWriter
from megatron.plan.exposure import Exposure
from megatron.plan.resolve import resolve_config
from megatron.text.merge import merge_datasets
from megatron.text.write_parts import write_parts_list
from megatron.train.build import open_held_out_samples, open_train_samples

META = {"tokenizer": {"n_tokens": 500, "sha256": "same", "eod_id": 0}, "append_eod": False}
MODEL = {"d_model": 32, "n_heads": 2, "n_layers": 1}
STEPS = {"total_iterations": 225, "warmup_iterations": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    prefixes = []
    for i in range(5):
        rng = np.random.default_rng(i)
        prefixes.append(str(folder / f"part-{i}"))
        with IndexedWriter(prefixes[-1], np.dtype(np.uint16), META) as writer:
            for n in rng.integers(0, 90, 60):
                writer.add_document(rng.integers(0, 500, n))
    write_parts_list(prefixes[:4], folder / "parts")
    merge_datasets(prefixes[:4], folder / "merged")
    for name in ("parts", "merged"):
        (folder / f"{name}.txt").write_text(f"0.7 {folder}/{name}\n0.3 {prefixes[4]}\n")
    return folder


@pytest.mark.parametrize("path", ["{}", "{}.txt"])
@pytest.mark.parametrize("dataset", [{}, {"order": "megatron"}, {"unique_tokens": 3000}])
def test_plan_and_samples_are_those_of_the_merged_dataset(
    folder: Path, path: str, dataset: dict[str, object]
) -> None:
    configs = []
    for name in ("parts", "merged"):
        data = str(folder / path.format(name))
        content = {
            "dataset": {"path_train": data, "path_eval": data, "seq_len": 16, "batch_size": 4} | dataset
        }
        configs.append(resolve_config({"name": "x", "model": MODEL, "lr_scheduler": STEPS, **content}))
    ours, theirs = configs
    assert ours.model.n_tokens == 500
    assert Exposure(ours).epoch_samples == Exposure(theirs).epoch_samples
    numbers = np.arange(900)
    samples, expected = (open_train_samples(config, 900).take(numbers) for config in configs)
    assert (samples == expected).all()
    held_out = [
        open_held_out_samples(str(config.dataset.path_eval), config).take(np.arange(200))
        for config in configs
    ]
    assert (held_out[0] == held_out[1]).all()
