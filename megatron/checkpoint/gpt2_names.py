"""GPT-2's tensors under Hugging Face's names: matrices turned over, queries, keys and values in one."""

import re

import torch
from torch import Tensor

from megatron.checkpoint.redundant import check_causal_mask

OUTSIDE = {
    "embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "unembedding.weight": "lm_head.weight",
}
IN_BLOCK = {
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
JOINED = ("attention.query", "attention.key", "attention.value")
PREFIX = "transformer."
BUFFER = re.compile(r"\.attn\.(masked_)?bias$")


def to_gpt2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names -> theirs; a matrix [out, in] becomes [in, out]."""
    named = {theirs: state[ours] for ours, theirs in OUTSIDE.items() if ours in state}
    for i in range(_n_blocks(state, "blocks.")):
        for kind in ("weight", "bias"):
            for ours, theirs in IN_BLOCK.items():
                named[f"transformer.h.{i}.{theirs}.{kind}"] = _turned(state[f"blocks.{i}.{ours}.{kind}"])
            joined = torch.cat([state[f"blocks.{i}.{part}.{kind}"] for part in JOINED])
            named[f"transformer.h.{i}.attn.c_attn.{kind}"] = _turned(joined)
    return named


def from_gpt2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `to_gpt2`. Files of the bare GPT2Model, without the prefix, are read too.

    ValueError names a tensor that is missing, there twice, or none of GPT-2's. Older files keep causal masks:
    these are left out where they are causal.
    """
    left: dict[str, Tensor] = {}
    for name, tensor in state.items():
        full = name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name
        if full in left:
            raise ValueError(f"{name}: is there twice, with and without {PREFIX!r}")
        left[full] = tensor
    for name in [name for name in left if BUFFER.search(name)]:
        check_causal_mask(name, left.pop(name))
    named = {ours: left.pop(theirs) for ours, theirs in OUTSIDE.items() if theirs in left}
    for i in range(_n_blocks(left, PREFIX + "h.")):
        for kind in ("weight", "bias"):
            for ours, theirs in IN_BLOCK.items():
                named[f"blocks.{i}.{ours}.{kind}"] = _turned(_take(left, f"{PREFIX}h.{i}.{theirs}.{kind}"))
            joined = _turned(_take(left, f"{PREFIX}h.{i}.attn.c_attn.{kind}"))
            if len(joined) % 3:
                raise ValueError(
                    f"{PREFIX}h.{i}.attn.c_attn.{kind}: {len(joined)} outputs, expected 3 x the width"
                )
            for ours, part in zip(JOINED, joined.chunk(3), strict=True):
                named[f"blocks.{i}.{ours}.{kind}"] = part.contiguous()
    if left:
        raise ValueError(f"{', '.join(sorted(left)[:4])}: got a tensor that GPT-2 does not have")
    return named


def _take(left: dict[str, Tensor], name: str) -> Tensor:
    if name not in left:
        raise ValueError(f"{name}: missing; the file is incomplete")
    return left.pop(name)


def _turned(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.ndim == 2 else tensor


def _n_blocks(state: dict[str, Tensor], prefix: str) -> int:
    numbers = [name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)]
    return 1 + max((int(number) for number in numbers if number.isascii() and number.isdigit()), default=-1)
