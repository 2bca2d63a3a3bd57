"""Map tensor names to those of Hugging Face's GPT-2, with transposed matrices and a fused QKV."""

import re

import torch
from torch import Tensor

from megatron.checkpoint.convert.redundant_tensors import check_causal_mask
from megatron.config.schema import ModelConfig

OUTER_NAMES = {
    "embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "norm.weight": "transformer.ln_f.weight",
    "norm.bias": "transformer.ln_f.bias",
    "unembedding.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
QKV_PARTS = ("attention.query", "attention.key", "attention.value")
PREFIX = "transformer."
# "h.0.attn.bias" and "h.0.attn.masked_bias", but not "h.0.attn.c_attn.bias" or "h.0.attn.c_proj.bias"
BUFFER = re.compile(r"\.attn\.(masked_)?bias$")


def export_gpt2_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename this model's tensors to those of GPT2LMHeadModel; a matrix [out, in] becomes [in, out]."""
    named = {theirs: state[ours] for ours, theirs in OUTER_NAMES.items() if ours in state}
    for i in range(config.n_layers):
        for kind in ("weight", "bias"):
            for ours, theirs in BLOCK_NAMES.items():
                named[f"transformer.h.{i}.{theirs}.{kind}"] = _transpose_matrix(
                    state[f"blocks.{i}.{ours}.{kind}"]
                )
            # c_attn is [query; key; value] over outputs, 3 x d_model
            # three [D, D] -> [3 D, D] -> transposed [D, 3 D]; the biases are [3 D] and are not transposed
            joined = torch.cat([state[f"blocks.{i}.{part}.{kind}"] for part in QKV_PARTS])
            named[f"transformer.h.{i}.attn.c_attn.{kind}"] = _transpose_matrix(joined)
    return named


def import_gpt2_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Invert `export_gpt2_names`. Names of the bare GPT2Model, without the prefix, are accepted too.

    Older files contain causal masks, which are checked and dropped. Raises ValueError that names a tensor
    which is missing, duplicated, or not part of GPT-2.
    """
    left: dict[str, Tensor] = {}
    for name, tensor in state.items():
        # GPT2Model saves "wte.weight", GPT2LMHeadModel "transformer.wte.weight"
        full = name if name.startswith((PREFIX, "lm_head.")) else PREFIX + name
        if full in left:
            raise ValueError(
                f"{name}: got two tensors of this name, with and without {PREFIX!r}, expected one"
            )
        left[full] = tensor
    # Masks are buffers, not weights: "attn.bias" is a mask, "attn.c_attn.bias" is a bias.
    for name in [name for name in left if BUFFER.search(name)]:
        check_causal_mask(name, left.pop(name))
    named = {ours: left.pop(theirs) for ours, theirs in OUTER_NAMES.items() if theirs in left}
    for i in range(_count_blocks(left, PREFIX + "h.")):
        for kind in ("weight", "bias"):
            for ours, theirs in BLOCK_NAMES.items():
                named[f"blocks.{i}.{ours}.{kind}"] = _transpose_matrix(
                    _pop_tensor(left, f"{PREFIX}h.{i}.{theirs}.{kind}")
                )
            joined = _transpose_matrix(_pop_tensor(left, f"{PREFIX}h.{i}.attn.c_attn.{kind}"))
            # [d_model, 3 d_model] -> [3 d_model, d_model], then split into query, key, value
            if len(joined) % 3:
                raise ValueError(
                    f"{PREFIX}h.{i}.attn.c_attn.{kind}: got {len(joined)} outputs, expected 3 x d_model"
                )
            for ours, part in zip(QKV_PARTS, joined.chunk(3), strict=True):
                named[f"blocks.{i}.{ours}.{kind}"] = part.contiguous()
    # every known tensor was popped above; dropping the rest could change the model
    if left:
        raise ValueError(f"{', '.join(sorted(left)[:4])}: got a tensor that GPT-2 does not have")
    return named


def _pop_tensor(left: dict[str, Tensor], name: str) -> Tensor:
    if name not in left:
        raise ValueError(f"{name}: missing; the file is incomplete")
    return left.pop(name)


def _transpose_matrix(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.ndim == 2 else tensor


def _count_blocks(state: dict[str, Tensor], prefix: str) -> int:
    # The highest number counts, not the number of blocks: with a missing block, _pop_tensor or the lookup by
    # name fails for it instead of shifting the later ones. isascii(): int() also accepts other scripts'
    # digits.
    numbers = [name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)]
    return 1 + max((int(number) for number in numbers if number.isascii() and number.isdigit()), default=-1)
