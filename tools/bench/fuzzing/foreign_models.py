"""Fuzz targets of other projects' models: architectures, published diffusion models, torch_dist folders."""

import io
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from fuzzing.cases import FileCase
from fuzzing.checkpoints import SHAPE, _check_weights, mutate_pickle, mutate_safetensors, mutate_torch
from fuzzing.harness import FuzzTarget
from fuzzing.mutate import mutate_bytes, mutate_json

# options of the model that make its export one of these architectures
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {
        "norm": "layernorm", "feed_forward": "gelu_exact", "biases": True, "parallel_residual": True,
        "rotary_dims": 4, "tied_embedding": False,
    },
    "olmo2": {"norm_placement": "output", "qk_norm": True, "qk_norm_all_heads": True},
    "mistral": {"attention_window": 4},
    "llama3.1": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_positions": 64},
}  # fmt: skip
LLADA = {
    "model_type": "llada", "activation_type": "silu", "block_type": "llama", "d_model": 16, "n_heads": 2,
    "n_layers": 1, "vocab_size": 50, "embedding_size": 64, "mask_token_id": 44, "layer_norm_type": "rms",
    "rope": True, "include_bias": False, "weight_tying": False, "mlp_hidden_size": 32, "rope_theta": 1e4,
}  # fmt: skip
MDLM = {
    "model_type": "mdlm",
    "vocab_size": 51,
    "hidden_dim": 16,
    "n_heads": 2,
    "n_blocks": 1,
    "model_length": 8,
}


def _build_weights(**more: Any) -> Any:
    from megatron.checkpoint.model_weights import Weights
    from megatron.config.schema import ModelConfig
    from megatron.model.initialization import init_weights
    from megatron.model.transformer import Gpt

    model = Gpt(ModelConfig(**{**SHAPE, **more}))
    init_weights(model, 0)
    return Weights(config=model.config, objective="autoregressive", state=model.state_dict(), seq_len=32)


def open_architectures(folder: Path) -> FileCase:
    """Open one folder per architecture."""
    from megatron.checkpoint.convert.formats import read_any
    from megatron.checkpoint.convert.huggingface import write_huggingface

    for name, options in FAMILIES.items():
        write_huggingface(_build_weights(**options), folder / name)

    def read() -> None:
        for name in FAMILIES:
            _check_weights(read_any(folder / name))

    mutators: dict[str, Any] = {f"{name}/config.json": mutate_json for name in FAMILIES}
    return FileCase(folder, mutators | {"gpt_neox/model.safetensors": mutate_safetensors}, read)


def open_diffusion(folder: Path) -> FileCase:
    """Open folders of LLaDA and MDLM."""
    import torch
    from safetensors.torch import save_file

    from megatron.checkpoint.convert.formats import read_any

    block = {
        "attn_norm": [16], "q_proj": [16, 16], "k_proj": [16, 16], "v_proj": [16, 16], "attn_out": [16, 16],
        "ff_norm": [16], "ff_proj": [32, 16], "up_proj": [32, 16], "ff_out": [16, 32],
    }  # fmt: skip
    llada = {f"model.transformer.blocks.0.{name}.weight": shape for name, shape in block.items()}
    llada |= {"model.transformer.wte.weight": [64, 16], "model.transformer.ff_out.weight": [64, 16]}
    llada |= {"model.transformer.ln_f.weight": [16]}
    mdlm = {
        "vocab_embed.embedding": [51, 16], "sigma_map.mlp.0.weight": [3, 256], "sigma_map.mlp.0.bias": [3],
        "sigma_map.mlp.2.weight": [3, 3], "sigma_map.mlp.2.bias": [3], "blocks.0.norm1.weight": [16],
        "blocks.0.attn_qkv.weight": [48, 16], "blocks.0.attn_out.weight": [16, 16],
        "blocks.0.norm2.weight": [16], "blocks.0.mlp.0.weight": [64, 16], "blocks.0.mlp.0.bias": [64],
        "blocks.0.mlp.2.weight": [16, 64], "blocks.0.mlp.2.bias": [16],
        "blocks.0.adaLN_modulation.weight": [96, 3], "blocks.0.adaLN_modulation.bias": [96],
        "output_layer.norm_final.weight": [16], "output_layer.linear.weight": [51, 16],
        "output_layer.linear.bias": [51], "output_layer.adaLN_modulation.weight": [32, 3],
        "output_layer.adaLN_modulation.bias": [32],
    }  # fmt: skip
    for name, config, shapes in (("llada", LLADA, llada), ("mdlm", MDLM, mdlm)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        tensors = {key: torch.ones(shape) for key, shape in shapes.items()}
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})

    def read() -> None:
        _check_weights(read_any(folder / "llada"))
        _check_weights(read_any(folder / "mdlm"))

    mutators: dict[str, Any] = {"llada/config.json": mutate_json, "mdlm/config.json": mutate_json}
    mutators |= dict.fromkeys(("llada/model.safetensors", "mdlm/model.safetensors"), mutate_safetensors)
    return FileCase(folder, mutators, read)


def open_torch_dist(folder: Path) -> FileCase:
    """Open a torch_dist folder: tensors and a byte object in torch's distributed format, and common.pt."""
    import torch
    from torch.distributed.checkpoint import FileSystemWriter, save

    from megatron.checkpoint.convert.megatron_export import export_megatron_names
    from megatron.checkpoint.convert.megatron_layouts import read_megatron

    weights = _build_weights()
    state: dict[str, Any] = {
        name.replace("layers.0.", "layers."): tensor[None] if ".layers." in name else tensor
        for name, tensor in export_megatron_names(weights).items()
    }
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_1"] = io.BytesIO(b"x")
    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    args = Namespace(
        num_attention_heads=2, num_query_groups=2, group_query_attention=False, kv_channels=8, swiglu=True,
        seq_length=16, vocab_size=50, add_bias_linear=False, norm_epsilon=1e-5, normalization="RMSNorm",
        position_embedding_type="rope", rotary_base=10000, rotary_percent=1.0, window_size=(3, 0),
        use_rope_scaling=True, rope_scaling_factor=8.0,
    )  # fmt: skip
    torch.save({"args": args, "iteration": 1}, folder / "common.pt")
    mutators: dict[str, Any] = {".metadata": mutate_pickle, "common.pt": mutate_torch}
    mutators |= {part.name: mutate_bytes for part in folder.glob("*.distcp")}
    return FileCase(
        folder, mutators, lambda: _check_weights(read_megatron(folder, objective="autoregressive"))
    )


TARGETS = (
    FuzzTarget("architectures", 2, open_architectures),
    FuzzTarget("diffusion folders", 2, open_diffusion),
    FuzzTarget("torch_dist folders", 2, open_torch_dist),
)
