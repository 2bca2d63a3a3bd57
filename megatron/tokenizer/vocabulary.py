"""Rows of the embedding: token ids, [MASK], padding."""

from dataclasses import dataclass

from megatron.config.presets import padded_rows


@dataclass(frozen=True)
class VocabularyRows:
    """Meaning of the rows of an embedding, for a tokenizer with ids 0..n_tokens - 1."""

    n_tokens: int

    @property
    def mask_id(self) -> int:
        """Row of [MASK], which is never an id of the tokenizer."""
        return self.n_tokens

    @property
    def rows(self) -> int:
        """Number of rows, a multiple of 128."""
        return padded_rows(self.n_tokens)
