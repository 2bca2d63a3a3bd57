"""A model with its tokenizer, asked about text: how likely a continuation is, and what it would write."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.checkpoint.weights import Weights
from megatron.config.choices import METHODS
from megatron.evaluation.generate import stream
from megatron.evaluation.generate_diffusion import generate_diffusion
from megatron.evaluation.likelihood import Likelihoods, Progress, Request, autoregressive_likelihoods
from megatron.evaluation.likelihood_diffusion import bound, decoded_greedily, left_to_right
from megatron.evaluation.nonfinite import check_log_p
from megatron.evaluation.sampling import Sampling
from megatron.evaluation.text import Writer
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.world import World

DEFAULT_LENGTH = 2048  # of a model that nobody says the length of, as in lm-eval


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a log-likelihood is found.

    method         ar: exact, token after token; mc: masked diffusion's bound. None: what the objective has
    num_mc         mc: masks for an answer
    only_generate  masked diffusion: ask only whether the model writes the continuation itself
    only_mc_nll    masked diffusion: the bound alone, without writing
    batch_size     requests (masked diffusion: rows, a request under one mask) of a forward
    """

    method: str | None = None
    num_mc: int = 32
    only_generate: bool = False
    only_mc_nll: bool = False
    seed: int = 0
    batch_size: int = 32

    def resolved(self, objective: str) -> "Scoring":
        """With the method filled in. ValueError where objective and options do not go together."""
        causal = objective == "autoregressive"
        method = self.method or ("ar" if causal else "mc")
        if method not in METHODS:
            raise ValueError(f"--method: found {method!r}, wanted {' or '.join(METHODS)}")
        if causal and (method != "ar" or self.only_generate or self.only_mc_nll):
            raise ValueError(
                "--method mc, --only-generate and --only-mc-nll are for masked diffusion, "
                "and the model is autoregressive; leave them out"
            )
        if self.only_generate and self.only_mc_nll:
            raise ValueError("--only-generate and --only-mc-nll: each leaves out what the other is; take one")
        if self.only_mc_nll and method != "mc":
            raise ValueError("--only-mc-nll is --method mc without writing; leave --method ar out")
        for name, found in (("--num-mc", self.num_mc), ("--batch-size", self.batch_size)):
            if found < 1:
                raise ValueError(f"{name}: found {found}, wanted 1 or more")
        return replace(self, method=method)


class Reader:
    """Text in, log-likelihoods and text out; the work is shared by all ranks, and all have the result.

    max_length   positions that the model reads: longer contexts lose their beginning
    n_cut        how many have done so by now
    """

    def __init__(self, weights: Weights, scoring: Scoring, world: World) -> None:
        """ValueError where no tokenizer is known, or scoring is not for this objective."""
        self.scoring, self.world = scoring.resolved(weights.objective), world
        self.writer = Writer(weights, str(world.device))
        self.model, self.tokenizer, self.causal = self.writer.model, self.writer.tokenizer, self.writer.causal
        learned = weights.config.n_positions if weights.config.positions == "learned" else None
        self.max_length = learned or weights.seq_len or DEFAULT_LENGTH
        self.end_id = self.tokenizer.eod_id
        self.begin_id: int | None = self.writer.begins_with
        self.n_cut = 0

    @property
    def prefix_id(self) -> int:
        """What stands before a text that has no context: lm-eval's `prefix_token_id` (see `Writer`)."""
        return self.writer.prefix_id

    def encode(self, texts: Sequence[str], begin: bool = True) -> list[tuple[int, ...]]:
        """The ids of each text; `begin`: after the id that begins a text, where the tokenizer has one."""
        unique = list(dict.fromkeys(texts))
        found = dict(zip(unique, self.tokenizer.encode_batch(unique), strict=True))
        first = () if self.begin_id is None or not begin else (self.begin_id,)
        return [(*(() if tuple(found[t][:1]) == first else first), *found[t]) for t in texts]

    def requests(self, pairs: Sequence[tuple[str, str]]) -> list[Request]:
        """(context, continuation) as ids, split as lm-eval splits them.

        Both are encoded as one text and cut where the context alone ends; spaces at the context's end belong
        to the continuation.
        """
        moved = []
        for context, continuation in pairs:
            kept = context.rstrip() if context else ""
            moved.append((kept, context[len(kept) :] + continuation) if context else ("", continuation))
        whole = self.encode([context + continuation for context, continuation in moved])
        bare = self.encode([continuation for _, continuation in moved], begin=False)
        contexts = self.encode([context for context, _ in moved])
        requests = []
        for (context, _), told, both, alone in zip(pairs, contexts, whole, bare, strict=True):
            if context:
                requests.append(Request(told or (self.prefix_id,), both[len(told) :]))
            elif alone[:1] == (self.prefix_id,):
                requests.append(Request(alone[:1], alone[1:]))
            else:
                requests.append(Request((self.prefix_id,), alone))
        return requests

    def likelihoods(
        self, requests: Sequence[Request], progress: Progress = lambda n: None, decode: bool = True
    ) -> Likelihoods:
        """Score requests as `scoring` says. `decode` False: nobody wants `greedy` of masked diffusion.

        NonFiniteRequestError for a log-likelihood that is NaN or Inf, though it was asked for.
        """
        how, size = self.scoring, self.scoring.batch_size
        shared: dict[str, Any] = {"batch_size": size, "max_length": self.max_length, "world": self.world}
        asked = {**shared, "progress": progress}
        if self.causal:
            found = autoregressive_likelihoods(self.model, requests, **asked)
        elif how.only_generate:
            found = decoded_greedily(self.model, requests, **asked)
        elif how.method == "ar":
            found = left_to_right(self.model, requests, **asked)
        else:
            found = bound(self.model, requests, num_mc=how.num_mc, seed=how.seed, **asked)
            if decode and not how.only_mc_nll:
                written = decoded_greedily(self.model, requests, **shared)
                found = Likelihoods(found.log_p, written.greedy, found.n_cut)
        if not how.only_generate or self.causal:
            check_log_p(found.log_p)
        self.n_cut += found.n_cut
        return found

    def continue_texts(
        self,
        contexts: Sequence[str],
        *,
        max_new_tokens: int,
        until: Sequence[str],
        how: Sampling,
        progress: Progress = lambda n: None,
    ) -> list[str]:
        """What the model writes after each context, up to one of `until` or the end of its document.

        A context that leaves no room for `max_new_tokens` loses its beginning. ValueError where there is no
        room for any.
        """
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"{max_new_tokens} new tokens leave no room for a context in {self.max_length} positions"
            )
        ids = [list(told) or [self.prefix_id] for told in self.encode(contexts)]
        self.n_cut += sum(len(told) > room for told in ids)
        prompts = [told[-room:] for told in ids]
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        size = self.scoring.batch_size
        written = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int32)  # ids + 1, so that 0 is none
        for turn, begin in enumerate(range(0, len(order), size)):
            batch = order[begin : begin + size]
            if turn % self.world.n_ranks == self.world.rank:
                new = self._continue([prompts[i] for i in batch], max_new_tokens, until, how)
                for i, tokens in zip(batch, new, strict=True):
                    written[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32) + 1
            progress(len(batch))
        all_ids = sum_over_ranks(written.to(self.world.device), self.world).long().cpu()
        texts = []
        for prompt, row in zip(prompts, all_ids, strict=True):
            text = self.writer.tail(prompt, (row[row > 0] - 1).tolist())
            texts.append(text[: _first_of(until, text)])
        return texts

    def _continue(
        self, prompts: list[list[int]], n_new: int, until: Sequence[str], how: Sampling
    ) -> list[list[int]]:
        if not self.causal:
            new = generate_diffusion(self.model, prompts, n_new_tokens=n_new, n_steps=n_new, how=how)
            return [
                tokens[: tokens.index(self.end_id)] if self.end_id in tokens else tokens for tokens in new
            ]
        found: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        for step in stream(self.model, prompts, max_new_tokens=n_new, how=how, stop_ids=[self.end_id]):
            for i, token in enumerate(step):
                if token is None or ended[i]:
                    continue
                if token == self.end_id:
                    ended[i] = True
                    continue
                found[i].append(token)
                text = self.writer.tail(prompts[i], found[i])
                ended[i] = _first_of(until, text) < len(text)
            if all(ended):
                break
        return found


def _first_of(words: Sequence[str], text: str) -> int:
    """Where the first of some words begins in a text; its length where none does."""
    places = [text.find(word) for word in words if word]
    return min([place for place in places if place >= 0], default=len(text))
