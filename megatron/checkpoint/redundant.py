"""Checks of tensors that repeat what is known: only where they do may a reader leave them out."""

import torch
from torch import Tensor


def check_tied_head(head: Tensor, embedding: Tensor, name: str) -> None:
    """ValueError where the head of a model with a tied embedding is another matrix."""
    if head.shape != embedding.shape or not torch.equal(head, embedding):
        raise ValueError(
            f"{name}: differs from the embedding, expected equal under tie_word_embeddings true. "
            "Set tie_word_embeddings to false in config.json where the head is a matrix of its own."
        )


def check_inverse_frequencies(name: str, tensor: Tensor, d_head: int, theta: float) -> None:
    """ValueError where a table of rotary frequencies is not theta^(-2k / K), in the table's precision."""
    expected = theta ** -(torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
    matches = tensor.is_floating_point() and tensor.numel() == expected.numel()
    if matches:
        limits = torch.finfo(tensor.dtype)
        # rounded once, or computed in that precision from a rounded base: a few units in the last place
        matches = torch.allclose(
            tensor.double().flatten(),
            expected,
            rtol=4 * limits.eps,
            atol=2 * limits.smallest_normal * limits.eps,
        )
    if not matches:
        raise ValueError(
            f"{name}: got other rotary frequencies than those of rope_theta {theta:g} and heads of {d_head}. "
            "This model computes them from rope_theta and cannot take others."
        )


def check_causal_mask(name: str, tensor: Tensor) -> None:
    """ValueError where GPT-2's `attn.bias` is no causal mask, or its `attn.masked_bias` hides too little."""
    if tensor.numel() == 1 and name.endswith("masked_bias"):
        is_causal = bool(tensor.float() <= -1e4)  # the score that a hidden position gets
    else:
        square = tensor.reshape(tensor.shape[-2:]) if tensor.ndim >= 2 and tensor.numel() else tensor
        rows = square.shape[-1] if square.ndim == 2 else 0
        is_causal = square.shape == (rows, rows) and torch.equal(
            square.float(), torch.ones(rows, rows).tril()
        )
    if not is_causal:
        raise ValueError(f"{name}: got another mask than the causal one, which is this model's only one")
