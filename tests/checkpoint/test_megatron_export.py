"""Checkpoints written for Megatron-LM: their layout, their arguments, and a way back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.convert.formats import convert_checkpoint, read_any
from megatron.checkpoint.convert.names import MEGATRON, export_names
from megatron.checkpoint.model_weights import Weights, save_weights
from megatron.model.transformer import Gpt
from tests.checkpoint.conftest import weights_of
from tests.checkpoint.test_megatron_layouts import GPT2, LLAMA, write_megatron_lm
from tests.conftest import build_tiny

LLAMA31 = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_positions": 8192}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "gpt2-exact": GPT2 | {"feed_forward": "gelu_exact"},
    "qwen2": LLAMA | {"qkv_biases": True, "tied_embedding": False},
    "qwen3": LLAMA | {"qk_norm": True},
    "llama3.1": LLAMA | LLAMA31 | {"rope_theta": 500000.0},
    "linear": LLAMA | {"rope_scaling": "linear", "rope_factor": 4.0, "rotary_dims": 4},
    "mistral": LLAMA | {"attention_window": 3},
}


def save(model: Gpt, path: Path, objective: str = "autoregressive") -> Weights:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.ndim == 1:
                generator = torch.Generator().manual_seed(number)
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    weights = weights_of(model, objective)
    save_weights(weights, path)
    return weights


@pytest.mark.parametrize("name", SHAPES)
def test_an_exported_checkpoint_is_read_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    weights = save(build_tiny(**SHAPES[name]), tmp_path / "native")
    convert_checkpoint(tmp_path / "native", tmp_path / "out", to="megatron")
    again = read_any(tmp_path / "out")
    assert again.config == weights.config and again.objective == "autoregressive"
    torch.testing.assert_close(again.state, weights.state, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_tensors_have_the_names_and_rows_of_megatron_core(name: str, tmp_path: Path) -> None:
    """The other direction of the layouts that the reader's tests build layer by layer."""
    model = build_tiny(**SHAPES[name])
    weights = save(model, tmp_path / "native")
    write_megatron_lm(model, tmp_path / "ck", 1, 1, "engine")
    (path,) = tmp_path.glob("ck/*/mp_rank_00/*.pt")
    saved = torch.load(path, weights_only=False)
    expected = saved["model"]
    exported = export_names(MEGATRON, weights.state, weights.config)
    expected = {key: tensor for key, tensor in expected.items() if "_extra_state" not in key}
    torch.testing.assert_close(exported, expected, rtol=0, atol=0)
    convert_checkpoint(tmp_path / "native", tmp_path / "out", to="megatron")
    (path,) = tmp_path.glob("out/*/mp_rank_00/*.pt")
    args, theirs = (vars(of["args"]) for of in (torch.load(path, weights_only=False), saved))
    shared = args.keys() & theirs.keys() - {"params_dtype", "seq_length", "vocab_size"}
    assert len(shared) > 12 and {key: args[key] for key in shared} == {key: theirs[key] for key in shared}


def test_a_diffusion_model_keeps_its_objective(tmp_path: Path) -> None:
    save(build_tiny(**LLAMA), tmp_path / "native", "masked_diffusion")
    convert_checkpoint(tmp_path / "native", tmp_path / "out", to="megatron")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    assert read_any(tmp_path / "out").objective == "masked_diffusion"
    with pytest.raises(ValueError, match="got masked_diffusion, expected autoregressive"):
        read_any(tmp_path / "out", objective="autoregressive")


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"parallel_residual": True}, "no such model .parallel_residual."),
        ({"norm": "layernorm"}, "LayerNorm has biases there"),
        ({"feed_forward": "gelu"}, "its tanh GELU is fused with a bias"),
        (LLAMA31 | {"rope_original_positions": 4096}, "no such model .rope_original_positions."),
    ],
)
def test_a_model_that_megatron_core_does_not_have_is_refused(
    tmp_path: Path, shape: dict[str, Any], sentence: str
) -> None:
    save(build_tiny(**LLAMA | shape), tmp_path / "native")
    with pytest.raises(ValueError, match=sentence):
        convert_checkpoint(tmp_path / "native", tmp_path / "out", to="megatron")
    assert not (tmp_path / "out").exists()
