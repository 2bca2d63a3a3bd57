"""Map the tensors of LLaDA, a published masked-diffusion model, to this model's names."""

import re

from torch import Tensor

from megatron.checkpoint.convert.redundant_tensors import check_inverse_frequencies
from megatron.config.schema import ModelConfig

LLADA_OUTER = {
    "wte": "embedding",
    "ln_f": "norm",
    "ff_out": "unembedding",
}
LLADA_BLOCK = {
    "attn_norm": "attention_norm",
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
    "attn_out": "attention.out",
    "ff_norm": "mlp_norm",
    "ff_proj": "mlp.gate",
    "up_proj": "mlp.up",
    "ff_out": "mlp.down",
}
LLADA_NAME = re.compile(r"(?:model\.)?transformer\.(?:blocks\.(\d+)\.)?(\w+)\.(weight|bias)")


def import_llada_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename the tensors of LLaDAModelLM. Raises ValueError for a tensor that it does not have."""
    named: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("rotary_emb.inv_freq"):
            check_inverse_frequencies(name, tensor, config)
            continue
        match = LLADA_NAME.fullmatch(name)
        parts = LLADA_OUTER if match is None or match[1] is None else LLADA_BLOCK
        if match is None or match[2] not in parts:
            raise ValueError(f"{name}: got a tensor that LLaDA does not have")
        ours = f"{parts[match[2]]}.{match[3]}"
        ours = ours if match[1] is None else f"blocks.{match[1]}.{ours}"
        if ours in named:
            raise ValueError(f"{name}: got two tensors of this name, with and without 'model.', expected one")
        named[ours] = tensor
    return named
