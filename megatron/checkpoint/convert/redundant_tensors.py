"""Checks of tensors that follow from other data. A reader may drop them only if these checks pass."""

import torch
from torch import Tensor

from megatron.config.schema import ModelConfig
from megatron.kernels.rotary import compute_frequencies


def check_tied_head(head: Tensor, embedding: Tensor, name: str) -> None:
    """Raise ValueError if a model with tied embeddings has a head that differs from the embedding."""
    if head.shape != embedding.shape or not torch.equal(head, embedding):
        raise ValueError(
            f"{name}: differs from the embedding, expected equal under tie_word_embeddings true. "
            "Set tie_word_embeddings to false in config.json if the head is a separate matrix."
        )


def check_inverse_frequencies(name: str, tensor: Tensor, config: ModelConfig) -> None:
    """Raise ValueError if rotary frequencies differ from those of the model, in the table's precision."""
    # [R / 2] in float64
    expected = compute_frequencies(config)
    matches = tensor.is_floating_point() and tensor.numel() == expected.numel()
    if matches:
        limits = torch.finfo(tensor.dtype)
        # Programs compute the table in float64 and round once, or compute in
        # the table's precision from a rounded base. Both are within a few
        # units in the last place; subnormals need an absolute tolerance.
        matches = torch.allclose(
            tensor.double().flatten(),
            expected,
            rtol=4 * limits.eps,
            atol=2 * limits.smallest_normal * limits.eps,
        )
    if not matches:
        raise ValueError(
            f"{name}: got other rotary frequencies than those of rope_theta {config.rope_theta:g} and "
            f"{config.rotary_channels} channels. This model computes them from its configuration."
        )


def check_causal_mask(name: str, tensor: Tensor) -> None:
    """Raise ValueError if GPT-2's `attn.bias` is not causal, or `attn.masked_bias` is above -1e4."""
    if tensor.numel() == 1 and name.endswith("masked_bias"):
        is_causal = bool(tensor.float() <= -1e4)  # score of a hidden position
    else:
        # [1, 1, S, S] -> [S, S]
        is_single = tensor.ndim >= 2 and tensor.numel() == tensor.shape[-2] * tensor.shape[-1] > 0
        square = tensor.reshape(tensor.shape[-2:]) if is_single else tensor
        rows = square.shape[-1] if is_single else 0
        is_causal = (
            is_single
            and square.shape == (rows, rows)
            and torch.equal(square.float(), torch.ones(rows, rows).tril())
        )
    if not is_causal:
        raise ValueError(f"{name}: got a mask that is not causal; this model supports only the causal mask")
