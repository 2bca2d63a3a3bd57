"""Rows of the embedding: the tokenizer's ids, then [MASK], then padding."""

from dataclasses import dataclass

from megatron.config.presets import padded_rows


@dataclass(frozen=True)
class VocabularyRows:
    """What each row of an embedding stands for, given the tokenizer's ids 0..n_tokens - 1."""

    n_tokens: int

    @property
    def mask_id(self) -> int:
        """The row of [MASK]: a reserved one, never an id of the tokenizer."""
        return self.n_tokens

    @property
    def rows(self) -> int:
        """All rows, a multiple of 128."""
        return padded_rows(self.n_tokens)
