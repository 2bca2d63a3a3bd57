"""The GPT: embedding, blocks, norm, and the embedding again as the head."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.config.parametrization import logit_multiplier
from megatron.config.schema import ModelConfig
from megatron.model.attention_mask import attention_mask, document_numbers, positions_in_document
from megatron.model.block import Block
from megatron.model.cache import KvCache
from megatron.model.dropout import layer_key
from megatron.model.norm import residual_norm
from megatron.model.rotary import rotary_at, rotary_table


class Gpt(nn.Module):
    """A transformer, by itself of the Llama family with a tied embedding. One model for both objectives.

    Built without values where the default device is meta; `initial.initialise` fills it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_rows, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        # the multiplier of the logits sits here, so that whoever multiplies by the head need not know it
        self.norm = residual_norm(config, logit_multiplier(config))
        self.position_embedding: nn.Embedding | None = None
        if config.positions == "learned":
            assert config.n_positions is not None, "read.py fills it in"
            self.position_embedding = nn.Embedding(config.n_positions, config.d_model)
        self.unembedding: nn.Linear | None = None
        if not config.tied_embedding:
            self.unembedding = nn.Linear(config.d_model, config.vocab_rows, bias=False)

    @property
    def head_weight(self) -> nn.Parameter:
        """The head's matrix [V, D]: the embedding's, where they are tied."""
        return self.embedding.weight if self.unembedding is None else self.unembedding.weight

    def hidden(
        self,
        tokens: Tensor,
        causal: bool,
        *,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        dropout_key: Tensor | None = None,
        cache: KvCache | None = None,
        first_position: int = 0,
        asked: Tensor | None = None,
    ) -> Tensor:
        """What the head reads: tokens int64 [B, S] -> [B, S, D].

        positions   [B, S] int64    where each token stands; None: first_position and on, or counted in each
                                    document
        visible     [B, S, S] bool  what each position may look at beside itself; None: everything
        dropout_key [B] int64       of each sample; attention dropout happens in training only
        cache       tokens are those that follow what it holds, all of one document; it takes them in
        asked       [B, Q] int64    positions that are wanted, [B, Q, D], some maybe twice: the last
                                    block computes no others; None: all. Not with dropout or a cache
        """
        if cache is not None:
            return self._hidden_after(tokens, cache)
        documents = None
        if self.config.document_mask:
            assert self.config.eod_id is not None, "read.py fills it in"
            documents = document_numbers(tokens, self.config.eod_id)
            positions = positions_in_document(documents) if positions is None else positions
        drops = self.training and self.config.attention_dropout > 0
        assert dropout_key is not None or not drops, "attention dropout draws by the samples' keys"
        mask = attention_mask(causal, documents, visible)
        x, cos, sin = self._place(tokens, positions, first_position)
        for i, block in enumerate(self.blocks):
            key = layer_key(dropout_key, i) if drops and dropout_key is not None else None
            last = i == len(self.blocks) - 1
            x = block(x, cos, sin, causal, mask=mask, dropout_key=key, asked=asked if last else None)
        return self.norm(x)

    def _hidden_after(self, tokens: Tensor, cache: KvCache) -> Tensor:
        """`hidden` of the positions after those in the cache; causal."""
        x, n = self.embedding(tokens), tokens.shape[1]
        here = slice(cache.n_read, cache.n_read + n)
        cos, sin = cache.cos, cache.sin
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[here]
        elif cos is not None and sin is not None:
            cos, sin = cos[here], sin[here]
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, cos, sin, True, cache=layer)
        cache.advance(n)
        return self.norm(x)

    def _place(
        self, tokens: Tensor, positions: Tensor | None, first_position: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Embedded tokens with learned positions, or with the tables cos and sin that turn them."""
        x, n = self.embedding(tokens), tokens.shape[1]
        if self.position_embedding is not None:
            table = self.position_embedding.weight
            assert positions is not None or n <= len(table), f"{n} positions, and the table has {len(table)}"
            return x + (table[:n] if positions is None else self.position_embedding(positions)), None, None
        d_head, theta = self.config.d_head, self.config.rope_theta
        if positions is None:
            return x, *rotary_table(n, d_head, theta, tokens.device, first_position)
        return x, *rotary_at(positions[:, None], d_head, theta)  # [B, 1, S, K]

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the embedding's rows: [..., D] -> [..., V]."""
        return F.linear(hidden, self.head_weight)

    def forward(self, tokens: Tensor, causal: bool, **reading: Tensor) -> Tensor:
        """tokens int64 [B, S] -> logits [B, S, V]; `reading` as for `hidden`."""
        return self.head(self.hidden(tokens, causal, **reading))
