"""Map the tensors of MDLM, a published masked-diffusion model, to this model's names."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.config.schema import ModelConfig

N_FREQUENCIES = 256  # width of MDLM's embedding of the time
# logit of [MASK], which MDLM's parametrisation
# excludes; its probability is exactly 0 in float32
MASK_LOGIT = -1e6


def import_mdlm_names(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename the tensors of MDLM, and fold its constant modulation into norms and output matrices.

    A block computes x + gate * f(norm(x) * (1 + scale) + shift), where (shift,
    scale, gate) are an affine function of the time. Without time conditioning
    the time is 0, so they are constants: norm has the gain g (1 + scale) and
    the bias shift, and the last matrix of f its rows times gate. Raises
    ValueError for missing and for unknown tensors.
    """
    left = {name.removeprefix("backbone."): tensor.double() for name, tensor in state.items()}
    left.pop("rotary_emb.inv_freq", None)  # a buffer that follows from the configuration

    def pop(name: str) -> Tensor:
        if name not in left:
            raise ValueError(f"{name}: missing; the file is incomplete or no MDLM")
        return left.pop(name)

    condition = _embed_time_zero(
        *(pop(f"sigma_map.mlp.{i}.{kind}") for i in (0, 2) for kind in ("weight", "bias"))
    )

    def pop_modulation(prefix: str, n_parts: int) -> tuple[Tensor, ...]:
        weight, bias = pop(f"{prefix}.adaLN_modulation.weight"), pop(f"{prefix}.adaLN_modulation.bias")
        return F.linear(condition, weight, bias).chunk(n_parts)

    named = {"embedding.weight": pop("vocab_embed.embedding")}
    for i in range(config.n_layers):
        block = f"blocks.{i}"  # in both projects
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = pop_modulation(block, 6)
        qkv = pop(f"{block}.attn_qkv.weight")
        if len(qkv) != 3 * config.d_model:
            raise ValueError(f"{block}.attn_qkv.weight: got {len(qkv)} rows, expected 3 x {config.d_model}")
        matrices = dict(zip(("query", "key", "value"), qkv.chunk(3), strict=True))  # rows of [3, H, K]
        matrices["out"] = gate[:, None] * pop(f"{block}.attn_out.weight")
        for part, weight in matrices.items():
            named[f"{block}.attention.{part}.weight"] = weight
            named[f"{block}.attention.{part}.bias"] = torch.zeros(len(weight))
        named[f"{block}.attention_norm.weight"] = pop(f"{block}.norm1.weight") * (1 + scale)
        named[f"{block}.attention_norm.bias"] = shift
        named[f"{block}.mlp_norm.weight"] = pop(f"{block}.norm2.weight") * (1 + mlp_scale)
        named[f"{block}.mlp_norm.bias"] = mlp_shift
        for kind in ("weight", "bias"):
            named[f"{block}.mlp.up.{kind}"] = pop(f"{block}.mlp.0.{kind}")
        named[f"{block}.mlp.down.weight"] = mlp_gate[:, None] * pop(f"{block}.mlp.2.weight")
        named[f"{block}.mlp.down.bias"] = mlp_gate * pop(f"{block}.mlp.2.bias")
    shift, scale = pop_modulation("output_layer", 2)
    named["norm.weight"], named["norm.bias"] = pop("output_layer.norm_final.weight") * (1 + scale), shift
    head, bias = pop("output_layer.linear.weight"), pop("output_layer.linear.bias").clone()
    if head.shape != (config.vocab_rows, config.d_model) or bias.shape != head.shape[:1]:
        raise ValueError(
            f"output_layer.linear: got {list(head.shape)}, expected a row per id and one for [MASK]"
        )
    bias[config.mask_row] = MASK_LOGIT
    named["unembedding.weight"] = torch.cat([head, bias[:, None]], dim=1)  # the channel of ones is the last
    if left:
        raise ValueError(f"{', '.join(sorted(left)[:4])}: got a tensor that MDLM does not have")
    return {name: tensor.float().contiguous() for name, tensor in named.items()}


def _embed_time_zero(weight: Tensor, bias: Tensor, out_weight: Tensor, out_bias: Tensor) -> Tensor:
    """Return the condition of the blocks at time 0: an MLP of cos and sin of 0 at all frequencies."""
    # cos(0) = 1 in the first half, sin(0) = 0 in the second
    angles = torch.cat([torch.ones(N_FREQUENCIES // 2), torch.zeros(N_FREQUENCIES // 2)]).double()
    if weight.shape[1] != len(angles):
        raise ValueError(f"sigma_map.mlp.0.weight: got {weight.shape[1]} inputs, expected {N_FREQUENCIES}")
    return F.silu(F.linear(F.silu(F.linear(angles, weight, bias)), out_weight, out_bias))
