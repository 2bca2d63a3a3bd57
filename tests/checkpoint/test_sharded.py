"""The sharded layout stores the same state, is verified, and runs no code when read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.checkpoint import layout, reshard, sharded, store
from megatron.checkpoint.convert.formats import convert_checkpoint
from tests.conftest import flip_middle_bit, load_newest, save_checkpoint

META = {"identity": "abc", "step": 3}
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def make_parts() -> dict[str, Any]:
    """Return the parts of a checkpoint of two parameters."""
    shapes = {"blocks.0.mlp.up.weight": (6, 4), "norm.weight": (4,)}
    generator = torch.Generator().manual_seed(0)

    def draw_normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    moments = {
        name: {"exp_avg": draw_normal(shape), "exp_avg_sq": draw_normal(shape), "step": torch.tensor(3.0)}
        for name, shape in shapes.items()
    }
    return {
        "model": {name: draw_normal(shape) for name, shape in shapes.items()},
        "optim": {"state": moments, "loss_scale": {"scale": torch.tensor(8.0)}},
        "lr": {"step": 3},
        "iter": {"step": 3, "next_sample": 30},
    }


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        for key, value in expected.items():
            assert_same(actual[key], value)
    else:
        assert actual == expected


@pytest.fixture
def in_shards(tmp_path: Path) -> Path:
    """Write a sharded checkpoint, converted from a full one, and return its path."""
    path = tmp_path / layout.new_checkpoint_name("run", preempt=False)
    reshard.reshard_to_sharded(save_checkpoint(tmp_path / "full", "run", make_parts(), META), path)
    return path


def test_full_to_sharded_to_full_loses_nothing(in_shards: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    reshard.reshard_to_full(in_shards, again)
    for path in (in_shards, again):
        parts, meta = store.load_checkpoint(path)
        assert_same(parts, make_parts())
        assert (meta["identity"], meta["step"]) == ("abc", 3)
    assert not (in_shards / layout.FILES["model"]).exists()
    with pytest.raises(ValueError, match="got the full layout, expected sharded"):
        reshard.reshard_to_full(again, tmp_path / "third")
    convert_checkpoint(again, tmp_path / "tool", to="sharded")
    assert_same(sharded.read_all_shards(tmp_path / "tool")["model"], make_parts()["model"])
    with pytest.raises(ValueError, match="got the sharded layout, expected full"):
        convert_checkpoint(tmp_path / "tool", tmp_path / "third", to="sharded")
    with pytest.raises(FileExistsError):
        reshard.reshard_to_full(in_shards, again)


@pytest.mark.parametrize("name", [SHARD, "meta.json"])
def test_a_flipped_bit_anywhere_is_detected(in_shards: Path, name: str) -> None:
    flip_middle_bit(in_shards / name)
    with pytest.raises(ValueError):
        store.load_checkpoint(in_shards)
    assert load_newest(in_shards.parent, "run") is None


def test_an_asynchronous_write_saves_the_state_at_its_start(tmp_path: Path) -> None:
    state = make_parts()
    (tmp_path / "soon").mkdir()
    writing = sharded.write_sharded_async(tmp_path / "soon", state, None)
    for tensor in state["model"].values():
        tensor.zero_()  # training continues
    sharded.wait_for_write(tmp_path / "soon", writing)
    assert_same(sharded.read_all_shards(tmp_path / "soon")["model"], make_parts()["model"])


def test_another_models_shapes_are_refused_by_name(in_shards: Path) -> None:
    other = make_parts()
    other["model"]["norm.weight"] = torch.zeros(5)
    with pytest.raises(ValueError, match="model.norm.weight: got shape"):
        sharded.read_sharded(in_shards, other)


def write_old_layout(path: Path) -> None:
    """Write a checkpoint as earlier versions did: with torch's pickled index, and small parts as files."""
    parts = make_parts()
    path.mkdir(parents=True)
    parts["iter"]["engine"] = {"loss_scale": parts["optim"]["loss_scale"]}
    store.write_parts(path, parts, store.SHARED_PARTS)
    dcp.save(sharded.flatten_state(parts), checkpoint_id=path, no_dist=True)
    store.write_meta(path, {**META, "state_dict_type": "sharded"})


def test_a_pickled_index_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "run.20250101-000000-000000", tmp_path / "new"
    write_old_layout(old)
    for read in (store.load_checkpoint, lambda path: store.find_newest_valid(path.parent, "run")):
        with pytest.raises(
            ValueError, match=r"Convert it once with tools/convert_checkpoint.py .* sharded\."
        ):
            read(old)
    convert_checkpoint(old, new, to="sharded")
    assert {path.name for path in new.iterdir()} == {"meta.json", SHARD}
    convert_checkpoint(old, tmp_path / "full", to="full")
    for path in (new, tmp_path / "full"):
        parts, meta = store.load_checkpoint(path)
        assert_same(parts, make_parts())
        assert (meta["identity"], meta["step"]) == ("abc", 3)


def test_state_that_json_cannot_store_is_refused_by_name() -> None:
    state = {"a": [1, 2.5, None, "x", True], "rng": torch.arange(5, dtype=torch.uint8)}
    state |= {"half": torch.ones(2, 3, dtype=torch.bfloat16), "scalar": torch.tensor(8.0)}
    assert_same(store.decode_state(json.loads(json.dumps(store.encode_state(state)))), state)
    for value, name in (({"a": {1: 2}}, "state.a"), ({"b": [{1, 2}]}, "state.b.0"), ((1,), "state")):
        with pytest.raises(ValueError, match=f"{name}: got"):
            store.encode_state(value)


def test_a_file_beside_the_listed_ones_is_refused(in_shards: Path) -> None:
    shutil.copy(in_shards / SHARD, in_shards / "shard-00002-model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match="not a file of the checkpoint"):
        store.load_checkpoint(in_shards)
