"""Datasets that a run refuses or warns about, with real training commands."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed import check_ids
from megatron.data.indexed_writer import IndexedWriter
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from megatron.train.build import open_held_out_samples, open_train_samples

SHAPE = {"d_model": 16, "n_heads": 2, "n_layers": 1}


def write_dataset(prefix: Path, odd: int | None = None, about: dict | None = None) -> str:
    """Write 40 documents of 25 ids below 100, one of them `odd`; no sidecar if `about` is None."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype("<i4"), about) as writer:
        for _ in range(40):
            writer.add_document(rng.integers(0, 100, 25))
    if odd is not None:
        ids = np.fromfile(f"{prefix}.bin", "<i4")
        ids[757] = odd
        ids.tofile(f"{prefix}.bin")
    if about is None:
        Path(f"{prefix}.json").unlink()
    return str(prefix)


def config_of(path: Path | str, n_tokens: int | None = 100, **data: object) -> object:
    model = SHAPE if n_tokens is None else SHAPE | {"n_tokens": n_tokens}
    dataset = {"path_train": str(path), "seq_len": 10, "batch_size": 4, **data}
    return resolve_config({"model": model, "lr_scheduler": {"total_iterations": 5}, "dataset": dataset})


@pytest.mark.parametrize("odd", [100, 70_000, -1])
@pytest.mark.parametrize("order", ["epoch", "megatron"])
@pytest.mark.parametrize("about", [None, {"tokenizer": {"n_tokens": 100}}])
def test_an_id_past_the_vocabulary_is_named_before_it_reaches_the_model(
    tmp_path: Path, odd: int, order: str, about: dict | None
) -> None:
    prefix = write_dataset(tmp_path / "odd", odd, about)
    good = write_dataset(tmp_path / "good", None, about)
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


def test_check_ids_agrees_with_a_direct_comparison() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        n_ids = int(rng.integers(1, 50))
        ids = rng.integers(-1, 51, size=(3, 4)) if rng.random() < 0.5 else rng.integers(0, n_ids, size=(3, 4))
        if ((ids >= 0) & (ids < n_ids)).all():
            check_ids(ids, n_ids, "x")
        else:
            with pytest.raises(ValueError, match="x: got id"):
                check_ids(ids, n_ids, "x")


def test_training_on_an_id_past_the_vocabulary_gives_a_one_line_error(root: Path, tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "odd", 70_000)
    words = [
        "model.d_model=16", "model.n_heads=2", "model.n_layers=1", "model.size=null", "model.n_tokens=100",
        f"dataset.path_train={prefix}", "dataset.seq_len=10", "dataset.batch_size=4",
        "lr_scheduler.total_iterations=30", "dist.cpu_only=true", "dist.dtype=float32",
        f"logging.run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    yaml = tmp_path / "run.yaml"
    yaml.write_text("{}\n")
    command = [sys.executable, str(root / "tools" / "pretrain.py"), str(yaml), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert f"error: {prefix}: got id 70000, expected 0 to 99" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dataset_without_a_sidecar_names_the_key_that_lets_it_train(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "foreign")
    with pytest.raises(ValueError, match=f"{prefix} has no sidecar .*model.n_tokens=50257"):
        config_of(prefix, n_tokens=None)
    assert plan_run(config_of(prefix)).warnings == ()


def test_a_sidecar_with_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", None, {"tokenizer": {"n_tokens": 100}})
    content = json.loads(Path(f"{prefix}.json").read_text())
    Path(f"{prefix}.json").write_text(json.dumps(content | {"tokens": 9999}))
    with pytest.raises(ValueError, match="x.json: got 9,999 tokens, expected 1,000 as in its .idx"):
        open_train_samples(config_of(prefix), 90)


def test_a_blend_of_documents_that_end_differently_is_refused_unless_the_key_allows_it(
    tmp_path: Path,
) -> None:
    tokenizer = {"n_tokens": 100, "sha256": "same"}
    first = write_dataset(
        tmp_path / "one", None, {"append_eod": True, "tokenizer": tokenizer | {"eod_id": 1}}
    )
    two = write_dataset(tmp_path / "two", None, {"append_eod": True, "tokenizer": tokenizer | {"eod_id": 2}})
    none = write_dataset(
        tmp_path / "none", None, {"append_eod": False, "tokenizer": tokenizer | {"eod_id": 1}}
    )
    foreign = write_dataset(tmp_path / "foreign")
    listed = tmp_path / "blend.txt"
    for other, use in ((two, "end-of-document id 2"), (none, "no end-of-document token")):
        listed.write_text(f"1 {first}\n1 {other}\n")
        with pytest.raises(
            ValueError, match=f"{other}: got {use}, expected end-of-document id 1 .*mixed_eod=true"
        ):
            plan_run(config_of(listed))
        plan = plan_run(config_of(listed, mixed_eod=True))
        assert len(plan.warnings) == 1 and plan.as_dict()["warnings"] == plan.warnings
        assert plan_run(config_of(first, path_eval=other)).warnings[0].startswith("dataset.path_eval: ")
    listed.write_text(f"1 {first}\n1 {foreign}\n")
    (warning,) = plan_run(config_of(listed)).warnings
    assert warning.startswith(f"{foreign}: no sidecar")
    assert plan_run(config_of(first)).identity == plan_run(config_of(first, mixed_eod=False)).identity
