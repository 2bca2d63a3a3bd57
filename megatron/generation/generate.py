"""Generate text with an autoregressive model and a key-value cache."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.generation.nonfinite_scores import check_logits
from megatron.generation.sampling import Sampling, draw_uniforms, sample_tokens
from megatron.model.kv_cache import KvCache
from megatron.model.transformer import Gpt


def stream_tokens(
    model: Gpt,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Iterable[int] = (),
) -> Iterator[list[int | None]]:
    """Yield one new token per prompt at every step; None while a prompt is read, and after it ended.

    A prompt ends with a token of `stop_ids` (which is yielded), or after `max_new_tokens`. Prompts of
    different lengths need no padding: shorter ones are continued while longer ones are still read. The
    random numbers of a prompt depend only on the seed and its index in the list.
    Raises ValueError for an empty prompt or ids outside the vocabulary, NonFiniteError for logits that are
    NaN or Inf.
    """
    check_prompts(model, prompts, max_new_tokens)
    lengths = [len(prompt) for prompt in prompts]
    device = model.embedding.weight.device
    longest, n_read = max(lengths), min(lengths)
    tokens = torch.zeros(len(prompts), longest + max_new_tokens, dtype=torch.long)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt)
    uniforms = None if sampling.is_greedy else _draw_rows(sampling.seed, lengths, tokens.shape[1])
    stops, ended = set(stop_ids), [max_new_tokens == 0] * len(prompts)
    if model.config.document_mask and model.config.eod_id is not None:
        stops.add(model.config.eod_id)  # with a document mask, later tokens would be another document
    with torch.inference_mode():
        # prompts of 3 and 5 tokens: the first pass reads 3 tokens of both,
        # then one per pass. The shorter prompt gets its first new token at
        # position 3, where the longer one still has its own token.
        cache = KvCache(model.config, len(prompts), tokens.shape[1], device, model.embedding.weight.dtype)
        new = tokens[:, :n_read]
        while not all(ended):
            states = model.hidden_states(new.to(device), causal=True, cache=cache)
            logits = model.compute_logits(states[:, -1])[:, : model.config.n_tokens]
            check_logits(logits)
            u = None if uniforms is None else uniforms[:, n_read].to(device)
            chosen = sample_tokens(logits, u, sampling).tolist()
            new_tokens: list[int | None] = [None] * len(prompts)
            # position n_read is predicted for all prompts;
            # a longer prompt keeps its own token there
            for i, token in enumerate(chosen):
                if n_read < lengths[i] or ended[i]:
                    continue
                tokens[i, n_read] = new_tokens[i] = token
                ended[i] = token in stops or n_read + 1 == lengths[i] + max_new_tokens
            yield new_tokens
            # an ended prompt is still read in the batch, with
            # token 0 at later positions, and yields None
            new = tokens[:, n_read : n_read + 1]
            n_read += 1


def generate(
    model: Gpt,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    stop_ids: Iterable[int] = (),
) -> list[list[int]]:
    """Return the new tokens of each prompt. See `stream_tokens`."""
    written: list[list[int]] = [[] for _ in prompts]
    for step in stream_tokens(
        model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stop_ids
    ):
        for tokens, token in zip(written, step, strict=True):
            if token is not None:
                tokens.append(token)
    return written


def check_prompts(model: Gpt, prompts: Sequence[Sequence[int]], n_new: int) -> None:
    """Raise ValueError for prompts that the model cannot read and continue by `n_new` tokens."""
    if not prompts:
        raise ValueError("generate: got no prompt, expected at least one")
    if n_new < 0:
        raise ValueError(f"generate: got {n_new} new tokens, expected 0 or more")
    n_tokens = model.config.n_tokens
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"generate: prompt {i} has no token. Begin it with the begin-of-text id.")
        if not 0 <= min(prompt) <= max(prompt) < n_tokens:
            raise ValueError(f"generate: prompt {i} has ids outside 0..{n_tokens - 1}. Check the tokenizer.")
        if model.config.document_mask and model.config.eod_id in prompt:
            raise ValueError(
                f"generate: prompt {i} continues after an end of document; the model reads single documents"
            )
    max_positions, n_positions = model.config.n_positions, max(map(len, prompts)) + n_new
    if max_positions is not None and model.config.positions == "learned" and n_positions > max_positions:
        raise ValueError(
            f"generate: got {n_positions} positions, expected at most the {max_positions} learned ones"
            ". Request fewer tokens."
        )


def _draw_rows(seed: int, lengths: Sequence[int], width: int) -> Tensor:
    """Return uniform numbers, float64 [B, width]; column p samples the token at position p.

    A prompt's sequence of numbers begins at its first
    new token, so padding to `width` does not change it.
    """
    uniforms = torch.zeros(len(lengths), width, dtype=torch.float64)
    for i, length in enumerate(lengths):
        uniforms[i, length:] = torch.from_numpy(draw_uniforms(seed, i, width - length))
    return uniforms
