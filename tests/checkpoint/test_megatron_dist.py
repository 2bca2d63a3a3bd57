"""Megatron core's torch_dist folders: tensors over all layers, beside optimizer states and byte objects."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron.checkpoint.convert.formats import read_any
from megatron.checkpoint.convert.names import MEGATRON, export_names
from megatron.evaluation.scored_models import find_models
from megatron.model.transformer import Gpt
from tests.checkpoint.test_megatron_layouts import GPT2, LLAMA, UNTIED, make_args
from tests.checkpoint.test_megatron_objective import EVERYTHING, FORK
from tests.conftest import build_tiny


def write_torch_dist(model: Gpt, folder: Path, stacked: bool, **args: Any) -> Path:
    """Write iter_0000005; `stacked`: one tensor over all layers, as for layers that are alike."""
    named = export_names(MEGATRON, model.state_dict(), model.config)
    state: dict[str, Any] = {}
    layers: dict[str, list[Tensor]] = {}
    for name, tensor in named.items():
        if stacked and name.startswith("decoder.layers."):
            layers.setdefault(name.split(".", 3)[3], []).append(tensor)
        else:
            state[name] = tensor
    state |= {f"decoder.layers.{name}": torch.stack(tensors) for name, tensors in layers.items()}
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.ones(7)
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"] = io.BytesIO(b"x")
    step = folder / "iter_0000005"
    save(state, storage_writer=FileSystemWriter(step), no_dist=True)
    described = make_args(model)
    vars(described).update(args)
    torch.save({"args": described, "iteration": 5, "checkpoint_version": 3.0}, step / "common.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return step


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("shape", [LLAMA, UNTIED, GPT2], ids=["llama", "untied", "gpt2"])
def test_a_folder_is_read_bit_for_bit(tmp_path: Path, shape: dict[str, Any], stacked: bool) -> None:
    model = build_tiny(**shape)
    write_torch_dist(model, tmp_path / "ck", stacked)
    weights = read_any(tmp_path / "ck")
    assert weights.config == model.config and weights.objective == "autoregressive"
    torch.testing.assert_close(weights.state, dict(model.state_dict()), rtol=0, atol=0)
    assert [model.path for model in find_models([tmp_path])] == [tmp_path / "ck"]


def test_a_diffusion_checkpoint_of_the_fork_is_known_as_one(tmp_path: Path) -> None:
    write_torch_dist(build_tiny(**LLAMA), tmp_path / "ck", True, **FORK, attn_mask=EVERYTHING)
    assert read_any(tmp_path / "ck").objective == "masked_diffusion"


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    step = write_torch_dist(build_tiny(**LLAMA), tmp_path / "ck", True)
    args = torch.load(step / "common.pt", weights_only=False)
    torch.save({"iteration": 5}, step / "common.pt")
    with pytest.raises(ValueError, match="common.pt: got no args with num_attention_heads"):
        read_any(tmp_path / "ck")
    torch.save(args, step / "common.pt")
    (data,) = step.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-2000])
    with pytest.raises(ValueError, match="distcp: cannot be read"):
        read_any(tmp_path / "ck")
