"""Text from a masked-diffusion model: hidden positions are filled in, a few a step, in a chosen order."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron.config.choices import ORDERS
from megatron.evaluation.generate import check_prompts
from megatron.evaluation.nonfinite import check_logits
from megatron.evaluation.sampling import Sampling, choose, uniforms
from megatron.model.gpt import Gpt
from megatron.tokenizer.vocabulary import VocabularyRows


def generate_diffusion(
    model: Gpt,
    prompts: Sequence[Sequence[int]],
    *,
    n_new_tokens: int,
    n_steps: int,
    order: str = "confidence",
    block_tokens: int | None = None,
    how: Sampling,
) -> list[list[int]]:
    """Exactly `n_new_tokens` after each prompt, in `n_steps` forwards.

    order         which hidden positions are settled at a step: the likeliest drawn tokens (the rest are
                  masked again: low-confidence remasking, LLaDA, arXiv 2502.09992, algorithm 5), random
                  ones, or the leftmost
    block_tokens  settle blocks of this many tokens from left to right (semi-autoregressive); by itself
                  all at once

    What is drawn for a prompt depends on the seed and its place in the list only. Raises ValueError for
    settings that are none, and as `check_prompts`; NonFiniteError for logits that are NaN or Inf.
    """
    check_prompts(model, prompts, n_new_tokens)
    if n_new_tokens < 1 or not 1 <= n_steps <= n_new_tokens:
        raise ValueError(
            f"n_steps: found {n_steps}, wanted 1 to {n_new_tokens}: a step settles a token or more"
        )
    if order not in ORDERS:
        raise ValueError(f"order: found {order!r}, wanted one of {', '.join(ORDERS)}")
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"block_tokens: found {block_tokens}, wanted 1 or more")
    written: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):  # one forward reads prompts of one length
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        plan = list(_plan(n_new_tokens, n_steps, n_new_tokens if block_tokens is None else block_tokens))
        filled = _fill(model, [prompts[i] for i in rows], rows, n_new_tokens, plan, order, how)
        for i, tokens in zip(rows, filled.tolist(), strict=True):
            written[i] = tokens
    return written


def _plan(n_new: int, n_steps: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(first, end, how many to settle) of each step, positions counted from the prompt's end.

    Steps are shared between blocks, and tokens between a block's steps, as evenly as whole numbers allow;
    a block gets one step at least.
    """
    begins = [*range(0, n_new, block), n_new]
    for begin, end in pairwise(begins):
        share = max(1, round(n_steps * end / n_new) - round(n_steps * begin / n_new))
        edges = [(end - begin) * i // share for i in range(share + 1)]
        for a, b in pairwise(edges):
            yield begin, end, b - a


@torch.inference_mode()
def _fill(
    model: Gpt,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    n_new: int,
    plan: list[tuple[int, int, int]],
    order: str,
    how: Sampling,
) -> Tensor:
    """Prompts of one length -> the tokens after them, int64 [B, n_new]; `numbers` key the draws."""
    device = model.embedding.weight.device
    mask_id = VocabularyRows(model.config.n_tokens).mask_id
    read = torch.as_tensor(prompts, dtype=torch.long, device=device)
    tokens = torch.cat([read, read.new_full((len(prompts), n_new), mask_id)], dim=1)
    n_read = read.shape[1]
    streams = [uniforms(how.seed, i, len(plan), 2, n_new) for i in numbers]
    noise = torch.from_numpy(np.stack(streams)).to(device)  # [B, steps, 2, n_new]: tokens, then order
    for step, (begin, end, n_settled) in enumerate(plan):
        part = slice(n_read + begin, n_read + end)
        hidden = tokens[:, part] == mask_id  # [B, block]
        logits = model.head(model.hidden(tokens, causal=False)[:, part])[..., : model.config.n_tokens]
        check_logits(logits)
        u = noise[:, step, 0, begin:end].flatten()
        drawn = choose(logits.flatten(0, 1), u, how).unflatten(0, hidden.shape)
        if order == "confidence":
            rank = logits.float().log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
        elif order == "random":
            rank = noise[:, step, 1, begin:end]
        else:
            rank = -torch.arange(end - begin, device=device).expand(hidden.shape).float()
        best = rank.masked_fill(~hidden, -torch.inf).topk(n_settled, dim=-1).indices
        settled = torch.zeros_like(hidden).scatter(-1, best, True)
        tokens[:, part] = torch.where(settled, drawn, tokens[:, part])
    return tokens[:, n_read:]
