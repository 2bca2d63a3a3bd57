"""Text from an autoregressive model, token by token, with keys and values kept."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.evaluation.nonfinite import check_logits
from megatron.evaluation.sampling import Sampling, choose, uniforms
from megatron.model.cache import KvCache
from megatron.model.gpt import Gpt


def stream(
    model: Gpt,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    how: Sampling,
    stop_ids: Iterable[int] = (),
) -> Iterator[list[int | None]]:
    """Yield a new token for each prompt at every step; None for one still read, or ended.

    A prompt ends with a token of `stop_ids` (which is yielded), or after `max_new_tokens`. Prompts of
    unlike length need no padding: the shorter ones already write while the longer are still read. What
    is drawn for a prompt depends on the seed and its place in the list only.
    Raises ValueError for an empty prompt or for ids that the model does not know, NonFiniteError for logits
    that are NaN or Inf.
    """
    check_prompts(model, prompts, max_new_tokens)
    lengths = [len(prompt) for prompt in prompts]
    device = model.embedding.weight.device
    longest, n_read = max(lengths), min(lengths)
    tokens = torch.zeros(len(prompts), longest + max_new_tokens, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt)
    drawn = None if how.greedy else _draws(how.seed, lengths, tokens.shape[1])
    stops, ended = set(stop_ids), [max_new_tokens == 0] * len(prompts)
    if model.config.document_mask and model.config.eod_id is not None:
        stops.add(model.config.eod_id)  # what follows would be another document
    with torch.inference_mode():
        cache = KvCache(model.config, len(prompts), tokens.shape[1], device, model.embedding.weight.dtype)
        new = tokens[:, :n_read]
        while not all(ended):
            logits = model.head(model.hidden(new.to(device), causal=True, cache=cache)[:, -1])
            logits = logits[:, : model.config.n_tokens]
            check_logits(logits)
            chosen = choose(logits, None if drawn is None else drawn[:, n_read].to(device), how).tolist()
            told: list[int | None] = [None] * len(prompts)
            for i, token in enumerate(chosen):
                if n_read < lengths[i] or ended[i]:
                    continue
                tokens[i, n_read] = told[i] = token
                ended[i] = token in stops or n_read + 1 == lengths[i] + max_new_tokens
            yield told
            new = tokens[:, n_read : n_read + 1]
            n_read += 1


def generate(
    model: Gpt,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    how: Sampling,
    stop_ids: Iterable[int] = (),
) -> list[list[int]]:
    """What `stream` yields, gathered: the new tokens of each prompt."""
    written: list[list[int]] = [[] for _ in prompts]
    for step in stream(model, prompts, max_new_tokens=max_new_tokens, how=how, stop_ids=stop_ids):
        for tokens, token in zip(written, step, strict=True):
            if token is not None:
                tokens.append(token)
    return written


def check_prompts(model: Gpt, prompts: Sequence[Sequence[int]], n_new: int) -> None:
    """ValueError for prompts that the model cannot read and continue by `n_new` tokens."""
    if not prompts:
        raise ValueError("generate: no prompt")
    if n_new < 0:
        raise ValueError(f"generate: {n_new} new tokens, wanted 0 or more")
    n_tokens = model.config.n_tokens
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"generate: prompt {i} has no token; begin with the one that begins a document")
        if not 0 <= min(prompt) <= max(prompt) < n_tokens:
            raise ValueError(f"generate: prompt {i} has ids outside 0..{n_tokens - 1}; wrong tokenizer?")
        if model.config.document_mask and model.config.eod_id in prompt:
            raise ValueError(
                f"generate: prompt {i} goes on after an end of document, and this model reads one at a time"
            )
    room, wanted = model.config.n_positions, max(map(len, prompts)) + n_new
    if room is not None and model.config.positions == "learned" and wanted > room:
        raise ValueError(
            f"generate: {wanted} positions wanted, the model has learned {room}; ask for fewer tokens"
        )


def _draws(seed: int, lengths: Sequence[int], width: int) -> Tensor:
    """float64 [B, width]: column p decides on the token at position p; the first new token's is draw 0."""
    drawn = torch.zeros(len(lengths), width, dtype=torch.float64)
    for i, length in enumerate(lengths):
        drawn[i, length:] = torch.from_numpy(uniforms(seed, i, width - length))
    return drawn
