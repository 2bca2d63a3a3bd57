"""From text to text with a model of either objective."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.checkpoint.weights import Weights
from megatron.evaluation.generate import generate, stream
from megatron.evaluation.generate_diffusion import generate_diffusion
from megatron.evaluation.sampling import Sampling
from megatron.evaluation.trained_length import warn_past_trained
from megatron.log import get_logger
from megatron.tokenizer.kinds import load_by_name
from megatron.tokenizer.special_tokens import prefix_id

log = get_logger(__name__)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for a character whose bytes are not all there


class Writer:
    """A model with its tokenizer.

    ignore_end   go on after a token that ends a document
    prefix_id    what stands before a text without context: the bos token that the tokenizer's settings name
                 (tokenizer_config.json), without settings what the tokenizer itself puts before a text, else
                 the end of a document, which stands there in the training data
    """

    def __init__(self, weights: Weights, device: str = "cpu", ignore_end: bool = False) -> None:
        """ValueError where no tokenizer is known, or it is another model's."""
        if weights.tokenizer is None:
            raise ValueError(f"{weights.source}: its tokenizer is not known; name it with --tokenizer")
        self.tokenizer = load_by_name(weights.tokenizer)
        if self.tokenizer.n_tokens > weights.config.n_tokens:
            raise ValueError(
                f"{weights.tokenizer}: has {self.tokenizer.n_tokens} ids, the model knows "
                f"{weights.config.n_tokens}; another tokenizer is the model's"
            )
        self.begins_with: int | None = getattr(self.tokenizer, "bos_id", None)
        self.prefix_id = prefix_id(weights.tokenizer, self.tokenizer)
        self.causal = weights.objective == "autoregressive"
        self.model = weights.model().to(device)
        self.ignore_end = ignore_end
        self.weights = replace(weights, state={})  # what is known of them; the model has them

    def ids(self, prompt: str) -> list[int]:
        """A prompt's ids, after the one that begins a document where there is such or no prompt."""
        ids = list(self.tokenizer.encode_batch([prompt])[0]) if prompt else []
        if self.begins_with is not None:
            return [self.begins_with, *ids]
        return ids or [self.prefix_id]

    def write(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        how: Sampling,
        *,
        n_steps: int | None = None,
        order: str = "confidence",
        block_tokens: int | None = None,
    ) -> list[str]:
        """The continuation of each prompt, up to the end of its document.

        The keywords are for masked diffusion, as in `generate_diffusion`; n_steps by itself one a token.
        """
        ids = [self.ids(prompt) for prompt in prompts]
        self._warn_past_trained(ids, max_new_tokens)
        end = self.tokenizer.eod_id
        if self.causal:
            if n_steps is not None or block_tokens is not None:
                raise ValueError(
                    "--steps and --block-tokens are for masked diffusion, and the model is autoregressive; "
                    "leave them out"
                )
            stops = [] if self.ignore_end else [end]
            new = generate(self.model, ids, max_new_tokens=max_new_tokens, how=how, stop_ids=stops)
        else:
            new = generate_diffusion(
                self.model,
                ids,
                n_new_tokens=max_new_tokens,
                n_steps=max_new_tokens if n_steps is None else n_steps,
                order=order,
                block_tokens=block_tokens,
                how=how,
            )
        if not self.ignore_end:
            new = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in new]
        return [self.tail(read, tokens) for read, tokens in zip(ids, new, strict=True)]

    def stream(self, prompts: Sequence[str], max_new_tokens: int, how: Sampling) -> Iterator[str]:
        """The prompt, then its continuation piece by piece. ValueError for diffusion, or several prompts."""
        if not self.causal or len(prompts) != 1:
            raise ValueError("stream: one prompt and an autoregressive model are wanted; leave --stream out")
        ids, end = self.ids(prompts[0]), self.tokenizer.eod_id
        self._warn_past_trained([ids], max_new_tokens)
        yield prompts[0]
        new: list[int] = []
        told = ""
        for (token,) in stream(
            self.model,
            [ids],
            max_new_tokens=max_new_tokens,
            how=how,
            stop_ids=[] if self.ignore_end else [end],
        ):
            assert token is not None, "a single prompt is read at once"
            if token == end and not self.ignore_end:
                break
            new.append(token)
            text = self.tail(ids, new)
            if not text.endswith(REPLACEMENT):  # the rest of a character may come with the next token
                yield text[len(told) :]
                told = text
        yield self.tail(ids, new)[len(told) :]

    def _warn_past_trained(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Log once where a text may pass the positions that the model was trained on.

        An autoregressive model does not read the last token that it writes.
        """
        n_positions = max(map(len, prompts), default=0) + max_new_tokens - self.causal
        for warning in warn_past_trained(self.weights, n_positions, "--max-new-tokens"):
            log.warning("%s", warning)

    def tail(self, read: Sequence[int], new: Sequence[int]) -> str:
        """What new tokens add to the text of those read: decoding a piece alone may lose a space."""
        text = read[1:] if self.begins_with is not None and read[0] == self.begins_with else read
        before = self.tokenizer.decode(text)
        return self.tokenizer.decode([*text, *new])[len(before) :]
