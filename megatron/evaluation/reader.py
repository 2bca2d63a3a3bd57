"""Score and generate text with a model and its tokenizer: log-likelihoods and continuations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
import torch

from megatron.checkpoint.model_weights import Weights
from megatron.evaluation.likelihood import (
    Likelihoods,
    ProgressCallback,
    Request,
    RequestOptions,
    gather_scores,
    iter_rank_batches,
    score_autoregressive,
)
from megatron.evaluation.likelihood_diffusion import decode_greedily, score_bound, score_left_to_right
from megatron.generation.completions import TextGenerator
from megatron.generation.generate import stream_tokens
from megatron.generation.generate_diffusion import generate_diffusion
from megatron.generation.nonfinite_scores import check_log_p
from megatron.generation.sampling import Sampling
from megatron.parallel.world import World

DEFAULT_LENGTH = 2048  # for a model of unknown length, as in lm-eval


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Settings for computing log-likelihoods.

    method         ar: exact, token by token; mc: masked
                   diffusion's bound. None: the objective's default
    num_mc         mc: masks per answer
    only_generate  masked diffusion: only check whether
                   greedy generation gives the continuation
    only_mc_nll    masked diffusion: only the bound, without generation
    batch_size     requests per forward pass (masked diffusion:
                   rows; a row is a request under one mask)
    dtype          of weights and activations; logits become float32 before the softmax
    """

    method: str | None = None
    num_mc: int = 32
    only_generate: bool = False
    only_mc_nll: bool = False
    seed: int = 0
    batch_size: int = 32
    dtype: str = "float32"

    def resolve(self, objective: str) -> "Scoring":
        """Return a copy with the method resolved. Raises ValueError if options and objective conflict."""
        causal = objective == "autoregressive"
        method = self.method or ("ar" if causal else "mc")
        if causal and (method != "ar" or self.only_generate or self.only_mc_nll):
            raise ValueError(
                "--method mc, --only-generate and --only-mc-nll are for masked diffusion, "
                "but the model is autoregressive. Omit them."
            )
        if self.only_mc_nll and method != "mc":
            raise ValueError("--only-mc-nll requires --method mc. Omit --method ar.")
        return replace(self, method=method)


class Reader:
    """Computes log-likelihoods and continuations of texts. All ranks share the work and return all results.

    max_length   positions that the model reads; longer contexts are truncated on the left
    n_truncated  number of contexts truncated so far
    """

    def __init__(self, weights: Weights, scoring: Scoring, world: World) -> None:
        """Raise ValueError if the tokenizer is unknown or the scoring is not for this objective."""
        scoring, self.world = scoring.resolve(weights.objective), world
        self.writer = TextGenerator(weights, str(world.device))
        self.writer.model.to(getattr(torch, scoring.dtype))
        self.model, self.tokenizer, self.causal = self.writer.model, self.writer.tokenizer, self.writer.causal
        learned = weights.config.n_positions if weights.config.positions == "learned" else None
        self.max_length = learned or weights.seq_len or DEFAULT_LENGTH
        self.end_id = self.tokenizer.eod_id
        self.begin_id: int | None = self.writer.bos_id
        self.n_truncated = 0
        self.scoring = scoring

    @property
    def prefix_id(self) -> int:
        """Id before a text without context: lm-eval's `prefix_token_id` (see `TextGenerator`)."""
        return self.writer.prefix_id

    def encode_text(self, text: str, begin: bool = True) -> tuple[int, ...]:
        """Return the ids of a text; `begin`: put bos_id first, if the tokenizer has one."""
        ids = tuple(self.tokenizer.encode_batch([text])[0])
        first = () if self.begin_id is None or not begin else (self.begin_id,)
        return ids if ids[:1] == first else first + ids

    def compute_likelihoods(
        self, requests: Sequence[Request], progress: ProgressCallback = lambda n: None, decode: bool = True
    ) -> Likelihoods:
        """Score requests with the method of `scoring`. `decode` False: skip `greedy` of masked diffusion.

        Raises NonFiniteRequestError if a requested log-likelihood
        is NaN or Inf.
        """
        scoring, options = self.scoring, self._options(progress)
        if self.causal:
            result = score_autoregressive(self.model, requests, **options)
        elif scoring.only_generate:
            result = decode_greedily(self.model, requests, **options)
        elif scoring.method == "ar":
            result = score_left_to_right(self.model, requests, **options)
        else:
            result = score_bound(self.model, requests, num_mc=scoring.num_mc, seed=scoring.seed, **options)
            if decode and not scoring.only_mc_nll:
                written = decode_greedily(self.model, requests, **self._options(lambda n: None))
                result = Likelihoods(result.log_p, written.greedy, result.n_truncated)
        if not scoring.only_generate or self.causal:
            check_log_p(result.log_p)
        self.n_truncated += result.n_truncated
        return result

    def _options(self, progress: ProgressCallback) -> RequestOptions:
        return RequestOptions(
            batch_size=self.scoring.batch_size,
            max_length=self.max_length,
            world=self.world,
            progress=progress,
        )

    def continue_texts(
        self,
        contexts: Sequence[str],
        *,
        max_new_tokens: int,
        until: Sequence[str],
        sampling: Sampling,
        progress: ProgressCallback = lambda n: None,
    ) -> list[str]:
        """Generate text after each context, up to one of `until` or the end of its document.

        A context is truncated on the left to leave room for
        `max_new_tokens`. Raises ValueError if that leaves no
        position for a context.
        """
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"{max_new_tokens} new tokens leave no room for a context in {self.max_length} positions"
            )
        ids = [list(self.encode_text(context)) or [self.prefix_id] for context in contexts]
        self.n_truncated += sum(len(sequence) > room for sequence in ids)
        prompts = [sequence[-room:] for sequence in ids]
        # ids + 1, so that 0 is padding
        written = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int32)
        ones = np.ones(len(prompts), dtype=np.int64)
        for batch in iter_rank_batches([len(prompt) for prompt in prompts], ones, self._options(progress)):
            new = self._generate([prompts[i] for i, _ in batch], max_new_tokens, until, sampling)
            for (i, _), tokens in zip(batch, new, strict=True):
                written[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32) + 1
        # the sum over ranks is in float64, which is exact for ids
        all_ids = gather_scores(written, self.world).astype(np.int64)
        texts = []
        for prompt, row in zip(prompts, all_ids, strict=True):
            text = self.writer.decode_new(prompt, (row[row > 0] - 1).tolist())
            texts.append(text[: _find_first(until, text)])
        return texts

    def _generate(
        self, prompts: list[list[int]], n_new: int, until: Sequence[str], sampling: Sampling
    ) -> list[list[int]]:
        if not self.causal:
            new = generate_diffusion(
                self.model, prompts, n_new_tokens=n_new, n_steps=n_new, sampling=sampling
            )
            return [list(takewhile(lambda token: token != self.end_id, tokens)) for tokens in new]
        written: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        for step in stream_tokens(
            self.model, prompts, max_new_tokens=n_new, sampling=sampling, stop_ids=[self.end_id]
        ):
            for i, token in enumerate(step):
                ended[i] |= token == self.end_id  # a token is None while a prompt is read
                if token is not None and not ended[i]:
                    written[i].append(token)
                    # on the text and not on ids: a stop word
                    # may begin in the middle of a token
                    text = self.writer.decode_new(prompts[i], written[i])
                    ended[i] = _find_first(until, text) < len(text)
            if all(ended):
                break
        return written


def _find_first(words: Sequence[str], text: str) -> int:
    """Return the smallest index of any of the words in the text, or its length if it contains no word."""
    places = [text.find(word) for word in words if word]
    return min([place for place in places if place >= 0], default=len(text))
