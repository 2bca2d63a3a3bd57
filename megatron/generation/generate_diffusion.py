"""Generate text with a masked-diffusion model by unmasking a few positions per step."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron.config.cli_choices import ORDERS
from megatron.generation.generate import check_prompts
from megatron.generation.nonfinite_scores import check_logits
from megatron.generation.sampling import Sampling, draw_uniforms, sample_tokens
from megatron.model.transformer import Gpt


def generate_diffusion(
    model: Gpt,
    prompts: Sequence[Sequence[int]],
    *,
    n_new_tokens: int,
    n_steps: int,
    order: str = "confidence",
    block_tokens: int | None = None,
    sampling: Sampling,
) -> list[list[int]]:
    """Generate exactly `n_new_tokens` after each prompt, in `n_steps` forward passes.

    order         masked positions to unmask at a step: those with the most probable
                  sampled tokens (the others stay masked: low-confidence remasking,
                  LLaDA, arXiv 2502.09992, algorithm 5), random ones, or the leftmost
    block_tokens  unmask blocks of this many tokens from left
                  to right (semi-autoregressive); default: all

    The random numbers of a prompt depend only on the seed
    and its index in the list. Raises ValueError for invalid settings
    and as `check_prompts`, NonFiniteError for logits that are NaN or Inf.
    """
    check_prompts(model, prompts, n_new_tokens)
    if n_new_tokens < 1 or not 1 <= n_steps <= n_new_tokens:
        raise ValueError(
            f"n_steps: got {n_steps}, expected 1 to {n_new_tokens}: each step unmasks at least one token"
        )
    if order not in ORDERS:
        raise ValueError(f"order: got {order!r}, expected one of {', '.join(ORDERS)}")
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"block_tokens: got {block_tokens}, expected 1 or more")
    written: list[list[int]] = [[] for _ in prompts]
    for length in sorted({len(prompt) for prompt in prompts}):  # a forward pass needs prompts of equal length
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        plan = list(_plan_steps(n_new_tokens, n_steps, block_tokens or n_new_tokens))
        filled = _fill_positions(model, [prompts[i] for i in rows], rows, n_new_tokens, plan, order, sampling)
        for i, tokens in zip(rows, filled.tolist(), strict=True):
            written[i] = tokens
    return written


def _plan_steps(n_new: int, n_steps: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, number of positions to unmask) of each step, counted from the prompt's end.

    Steps are divided over blocks, and a block's tokens over its steps,
    as evenly as integers allow. A block has at least one step.
    """
    # 5 tokens, 2 steps, one block: edges 0 2 5, so the steps unmask 2 and 3 tokens
    begins = [*range(0, n_new, block), n_new]
    for begin, end in pairwise(begins):
        share = max(1, round(n_steps * end / n_new) - round(n_steps * begin / n_new))
        edges = [(end - begin) * i // share for i in range(share + 1)]
        for a, b in pairwise(edges):
            yield begin, end, b - a


@torch.inference_mode()
def _fill_positions(
    model: Gpt,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    n_new: int,
    plan: list[tuple[int, int, int]],
    order: str,
    sampling: Sampling,
) -> Tensor:
    """Return the tokens after prompts of equal length, int64 [B, n_new]; `numbers` key the random numbers."""
    device = model.embedding.weight.device
    mask_id = model.config.mask_row
    read = torch.as_tensor(prompts, dtype=torch.long, device=device)
    tokens = torch.cat([read, read.new_full((len(prompts), n_new), mask_id)], dim=1)
    n_read = read.shape[1]
    # drawn for all steps in advance, one stream
    # per prompt: 16 bytes per step and new token
    streams = [draw_uniforms(sampling.seed, i, len(plan), 2, n_new) for i in numbers]
    noise = torch.from_numpy(np.stack(streams)).to(device)  # [B, steps, 2, n_new]: 0: tokens, 1: order
    for step, (begin, end, n_settled) in enumerate(plan):
        block = slice(n_read + begin, n_read + end)
        hidden = tokens[:, block] == mask_id  # [B, block]
        # logits of the current block; [MASK] and padding rows are excluded
        states = model.hidden_states(tokens, causal=False)[:, block]
        logits = model.compute_logits(states)[..., : model.config.n_tokens]
        check_logits(logits)
        if model.config.mask_id is not None:  # an id of the tokenizer, which no position may keep
            logits[..., mask_id] = -torch.inf
        u = noise[:, step, 0, begin:end].flatten()
        # every position is sampled at each step,
        # but only the chosen ones are written
        sampled = sample_tokens(logits.flatten(0, 1), u, sampling).unflatten(0, hidden.shape)
        if order == "confidence":
            priority = logits.float().log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        elif order == "random":
            priority = noise[:, step, 1, begin:end]
        else:
            priority = -torch.arange(end - begin, device=device).expand(hidden.shape).float()
        # topk over masked positions only; the plan guarantees that at least
        # n_settled of them are left. -Inf for the positions already written:
        # every row has as many of them as earlier steps of the block settled
        best = priority.masked_fill(~hidden, -torch.inf).topk(n_settled, dim=-1).indices
        settled = torch.zeros_like(hidden).scatter(-1, best, True)
        tokens[:, block] = torch.where(settled, sampled, tokens[:, block])
    return tokens[:, n_read:]
