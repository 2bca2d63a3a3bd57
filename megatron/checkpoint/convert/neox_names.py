"""Map tensor names to those of Hugging Face's GPT-NeoX (Pythia), with a fused QKV.

The rows of query_key_value are, for each head in turn, its query, key and value of d_head rows each.
"""

import re

import torch
from torch import Tensor

from megatron.checkpoint.convert.redundant_tensors import check_causal_mask, check_inverse_frequencies
from megatron.config.schema import ModelConfig

OUTER_NAMES = {
    "embedding": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "unembedding": "embed_out",
}
BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.out": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
QKV_PARTS = ("attention.query", "attention.key", "attention.value")
QKV, PREFIX = "attention.query_key_value", "gpt_neox."
BLOCK = re.compile(r"(?:blocks|gpt_neox\.layers)\.(\d+)\.(.+)\.(weight|bias)")
# buffers of older files: the causal mask, a score of hidden positions, a table of frequencies
BUFFER = re.compile(r"\.attention\.(masked_)?bias$")


def export_neox_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename this model's tensors to those of GPTNeoXForCausalLM, and join query, key and value."""
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        block = BLOCK.fullmatch(name)
        if block is None:
            module, _, kind = name.rpartition(".")
            named[f"{OUTER_NAMES[module]}.{kind}"] = tensor
            continue
        number, part, kind = block.groups()
        if part not in QKV_PARTS:
            named[f"{PREFIX}layers.{number}.{BLOCK_NAMES[part]}.{kind}"] = tensor
        elif part == QKV_PARTS[0]:
            parts = [state[f"blocks.{number}.{part_name}.{kind}"] for part_name in QKV_PARTS]
            # three [H K, ...] -> [H, 3, K, ...] -> [3 H K, ...]
            heads = torch.stack([tensor.unflatten(0, (config.n_heads, -1)) for tensor in parts], dim=1)
            named[f"{PREFIX}layers.{number}.{QKV}.{kind}"] = heads.flatten(0, 2)
    return named


def import_neox_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Invert `export_neox_names`. Names of the bare GPTNeoXModel, without the prefix, are accepted too.

    Buffers of older files are checked and dropped. Raises ValueError for any other tensor.
    """
    outer = {theirs: ours for ours, theirs in OUTER_NAMES.items()}
    inner = {theirs: ours for ours, theirs in BLOCK_NAMES.items()}
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        full = name if name.startswith((PREFIX, "embed_out.")) else PREFIX + name
        if full.endswith(".rotary_emb.inv_freq"):
            check_inverse_frequencies(name, tensor, config)
            continue
        if BUFFER.search(full):
            check_causal_mask(name, tensor)
            continue
        block, (module, _, kind) = BLOCK.fullmatch(full), full.rpartition(".")
        if block is not None and block[2] == QKV:
            renamed = _split_qkv(name, tensor, config, f"blocks.{block[1]}", block[3])
        elif block is not None and block[2] in inner:
            renamed = {f"blocks.{block[1]}.{inner[block[2]]}.{block[3]}": tensor}
        elif module in outer:
            renamed = {f"{outer[module]}.{kind}": tensor}
        else:
            raise ValueError(f"{name}: got a tensor that GPT-NeoX does not have")
        if set(renamed) & set(named):
            raise ValueError(
                f"{name}: got two tensors of this name, with and without {PREFIX!r}, expected one"
            )
        named |= renamed
    return named


def _split_qkv(name: str, tensor: Tensor, config: ModelConfig, block: str, kind: str) -> dict[str, Tensor]:
    rows = 3 * config.n_heads * config.d_head
    if len(tensor) != rows:
        raise ValueError(f"{name}: got {len(tensor)} rows, expected {rows}: 3 x heads x d_head")
    parts = tensor.unflatten(0, (config.n_heads, 3, config.d_head)).unbind(1)  # 3 x [H, K, ...]
    return {f"{block}.{ours}.{kind}": part.flatten(0, 1) for ours, part in zip(QKV_PARTS, parts, strict=True)}
