"""The sharded layout holds the same state, verified and without code in it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import layout, reshard, sharded, store
from megatron.checkpoint.convert import convert
from tests.conftest import load_newest

META = {"identity": "abc", "step": 3}


def whole() -> dict[str, Any]:
    """Parts of a checkpoint of two parameters."""
    shapes = {"blocks.0.mlp.up.weight": (6, 4), "norm.weight": (4,)}
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    moments = {
        name: {"exp_avg": drawn(shape), "exp_avg_sq": drawn(shape), "step": torch.tensor(3.0)}
        for name, shape in shapes.items()
    }
    return {
        "model": {name: drawn(shape) for name, shape in shapes.items()},
        "optim": {"state": moments, "loss_scale": {"scale": torch.tensor(8.0)}},
        "lr": {"step": 3},
        "iter": {"step": 3, "next_sample": 30},
    }


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        for key, value in wanted.items():
            assert_same(found[key], value)
    else:
        assert found == wanted


@pytest.fixture
def in_shards(tmp_path: Path) -> Path:
    """A sharded checkpoint made from a full one."""
    path = tmp_path / layout.new_name("run", preempt=False)
    reshard.to_sharded(store.save(tmp_path / "full", "run", whole(), META), path)
    return path


def test_full_to_sharded_to_full_loses_nothing(in_shards: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    reshard.to_full(in_shards, again)
    for path in (in_shards, again):
        parts, meta = store.load(path)
        assert_same(parts, whole())
        assert (meta["identity"], meta["step"]) == ("abc", 3)
    assert not (in_shards / layout.FILES["model"]).exists()
    with pytest.raises(ValueError, match="is full already"):
        reshard.to_full(again, tmp_path / "third")
    with pytest.raises(FileExistsError):
        reshard.to_full(in_shards, again)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.json"])
def test_a_flipped_bit_anywhere_is_found_out(in_shards: Path, name: str) -> None:
    content = bytearray((in_shards / name).read_bytes())
    content[len(content) // 2] ^= 1
    (in_shards / name).write_bytes(content)
    with pytest.raises(ValueError):
        store.load(in_shards)
    assert load_newest(in_shards.parent, "run") is None


def test_what_is_written_in_the_background_is_the_state_of_that_moment(tmp_path: Path) -> None:
    state = whole()
    (tmp_path / "soon").mkdir()
    writing = sharded.write_soon(tmp_path / "soon", state, None)
    for tensor in state["model"].values():
        tensor.zero_()  # training goes on
    sharded.finish(tmp_path / "soon", writing)
    assert_same(sharded.read_whole(tmp_path / "soon")["model"], whole()["model"])


def test_another_models_shapes_are_refused_by_name(in_shards: Path) -> None:
    other = whole()
    other["model"]["norm.weight"] = torch.zeros(5)
    with pytest.raises(ValueError, match="model.norm.weight: found shape"):
        sharded.read(in_shards, other)


def test_metadata_that_would_run_code_is_refused(in_shards: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "touched",))

    (in_shards / sharded.METADATA).write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="no place in a checkpoint"):
        sharded.read_metadata(in_shards)
    assert not (tmp_path / "touched").exists()


def test_the_tool_reshapes_a_checkpoint_and_weights_are_read_from_shards(
    in_shards: Path, tmp_path: Path
) -> None:
    convert(in_shards, tmp_path / "back", to="full")
    assert_same(store.load(tmp_path / "back")[0], whole())
    convert(tmp_path / "back", tmp_path / "again", to="sharded")
    assert_same(sharded.read_whole(tmp_path / "again")["model"], whole()["model"])
    with pytest.raises(ValueError, match="is sharded already, wanted full"):
        convert(tmp_path / "again", tmp_path / "third", to="sharded")
