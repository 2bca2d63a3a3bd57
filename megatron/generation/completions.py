"""Generate text from text with a model of either objective."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.checkpoint.convert.tokenizer_files import find_prefix_id
from megatron.checkpoint.model_weights import Weights
from megatron.generation.generate import generate, stream_tokens
from megatron.generation.generate_diffusion import generate_diffusion
from megatron.generation.sampling import Sampling
from megatron.generation.trained_length import check_trained_length
from megatron.log import get_logger
from megatron.tokenizer.kinds import load_tokenizer_by_name

log = get_logger(__name__)

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # result of decoding an incomplete UTF-8 character


class TextGenerator:
    """A model with its tokenizer.

    ignore_end   continue after an end-of-document token
    bos_id       id that the tokenizer puts before each text; None: none
    prefix_id    id before a text without context: the bos token of the tokenizer's
                 settings (tokenizer_config.json), without settings the id
                 that the tokenizer puts before a text, else the end-of-document id,
                 which precedes every document in the training data
    """

    def __init__(self, weights: Weights, device: str = "cpu", ignore_end: bool = False) -> None:
        """Raise ValueError if the tokenizer is unknown or has more ids than the model."""
        if weights.tokenizer is None:
            raise ValueError(f"{weights.source}: its tokenizer is unknown; give it with --tokenizer")
        self.tokenizer = load_tokenizer_by_name(weights.tokenizer)
        if self.tokenizer.n_tokens > weights.config.n_tokens:
            raise ValueError(
                f"{weights.tokenizer}: got {self.tokenizer.n_tokens} ids, expected at most "
                f"{weights.config.n_tokens}, as the model has. Give the model's tokenizer."
            )
        self.bos_id: int | None = getattr(self.tokenizer, "bos_id", None)
        self.prefix_id = find_prefix_id(weights.tokenizer, self.tokenizer)
        self.causal = weights.objective == "autoregressive"
        self.model = weights.build_model().to(device)
        self.ignore_end = ignore_end
        self.weights = replace(weights, state={})  # metadata only; the model has the tensors

    def encode_prompt(self, prompt: str) -> list[int]:
        """Return a prompt's ids after bos_id, if there is one; for an empty prompt at least prefix_id."""
        ids = list(self.tokenizer.encode_batch([prompt])[0]) if prompt else []
        if self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids or [self.prefix_id]

    def write(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        sampling: Sampling,
        *,
        n_steps: int | None = None,
        order: str = "confidence",
        block_tokens: int | None = None,
    ) -> list[str]:
        """Return the continuation of each prompt, up to the end of its document.

        The keywords are for masked diffusion, see
        `generate_diffusion`; default of n_steps: one per token.
        """
        ids = [self.encode_prompt(prompt) for prompt in prompts]
        self._check_trained_length(ids, max_new_tokens)
        end = self.tokenizer.eod_id
        if self.causal:
            if n_steps is not None or block_tokens is not None:
                raise ValueError("--steps, --block-tokens: got an autoregressive model. Omit them.")
            stops = [] if self.ignore_end else [end]
            new = generate(self.model, ids, max_new_tokens=max_new_tokens, sampling=sampling, stop_ids=stops)
        else:
            new = generate_diffusion(
                self.model,
                ids,
                n_new_tokens=max_new_tokens,
                n_steps=max_new_tokens if n_steps is None else n_steps,
                order=order,
                block_tokens=block_tokens,
                sampling=sampling,
            )
        if not self.ignore_end:
            new = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in new]
        return [self.decode_new(read, tokens) for read, tokens in zip(ids, new, strict=True)]

    def stream_text(self, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
        """Yield the prompt, then its continuation piece by piece. Raises ValueError for other models."""
        if not self.causal or len(prompts) != 1:
            raise ValueError("--stream: expected one prompt and an autoregressive model. Omit --stream.")
        ids, end = self.encode_prompt(prompts[0]), self.tokenizer.eod_id
        self._check_trained_length([ids], max_new_tokens)
        yield prompts[0]
        new: list[int] = []
        written = ""
        for (token,) in stream_tokens(
            self.model,
            [ids],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_ids=[] if self.ignore_end else [end],
        ):
            assert token is not None, "a single prompt is read in the first step"
            if token == end and not self.ignore_end:
                break
            new.append(token)
            # decoded from the beginning each time: the text of a token
            # depends on its neighbours, a character may span several tokens
            text = self.decode_new(ids, new)
            if not text.endswith(REPLACEMENT):  # the next token may complete the character
                yield text[len(written) :]
                written = text
        yield self.decode_new(ids, new)[len(written) :]

    def _check_trained_length(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Log a warning if a text may exceed the positions that the model was trained on.

        An autoregressive model does not read the last token that it generates.
        """
        n_positions = max(map(len, prompts), default=0) + max_new_tokens - self.causal
        for warning in check_trained_length(self.weights, n_positions, "--max-new-tokens"):
            log.warning("%s", warning)

    def decode_new(self, read: Sequence[int], new: Sequence[int]) -> str:
        """Return the text that new tokens add after those read. Decoding them alone may lose a space."""
        text = read[1:] if self.bos_id is not None and read[0] == self.bos_id else read
        return self.tokenizer.decode([*text, *new])[len(self.tokenizer.decode(text)) :]
