"""Mapping of parameter names to those of transformers."""

import torch

from megatron.model.transformer import Gpt

LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "unembedding": "lm_head",
}


def rename_weights(model: Gpt, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the weights under transformers' names; of several matching names the longest is replaced."""
    state = {}
    for name, tensor in model.state_dict().items():
        for ours in sorted(names, key=len, reverse=True):
            name = f".{name}".replace(f".{ours}.", f".{names[ours]}.")[1:]
        state[name if name.split(".")[0] in ("model", "transformer", "lm_head") else f"model.{name}"] = tensor
    return state
