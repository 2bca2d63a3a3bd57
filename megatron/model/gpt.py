"""The GPT: embedding, blocks, final norm and a tied or separate head."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.config.schema import ModelConfig
from megatron.kernels.dropout import derive_layer_key
from megatron.model.attention_mask import build_attention_mask, document_numbers, positions_in_document
from megatron.model.block import Block
from megatron.model.kv_cache import KvCache
from megatron.model.norm import build_residual_norm
from megatron.model.rotary import rotary_at_positions, rotary_table
from megatron.plan.parametrization import logit_multiplier


class Gpt(nn.Module):
    """A transformer for both objectives; by default of the Llama family with a tied embedding.

    On the meta device it is built without values. `initialization.init_weights` fills them in.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_rows, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        # the final norm contains the logit multiplier: the fused loss multiplies by the plain head weight
        self.norm = build_residual_norm(config, logit_multiplier(config))
        self.position_embedding: nn.Embedding | None = None
        if config.positions == "learned":
            assert config.n_positions is not None, "set by read.py"
            self.position_embedding = nn.Embedding(config.n_positions, config.d_model)
        self.unembedding: nn.Linear | None = None
        if not config.tied_embedding:
            self.unembedding = nn.Linear(config.d_model, config.vocab_rows, bias=False)

    @property
    def head_weight(self) -> nn.Parameter:
        """Weight of the head [V, D]: that of the embedding if they are tied."""
        return self.embedding.weight if self.unembedding is None else self.unembedding.weight

    def hidden_states(
        self,
        tokens: Tensor,
        causal: bool,
        *,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        dropout_key: Tensor | None = None,
        cache: KvCache | None = None,
        first_position: int = 0,
        query_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head: tokens int64 [B, S] -> [B, S, D].

        positions       [B, S] int64    position of each token; None: consecutive from first_position, or
                                        counted from the start of each document
        visible         [B, S, S] bool  keys that each position may attend to; None: all
        dropout_key     [B] int64       key of each sample; attention dropout is applied in training only
        cache           tokens continue the cached positions, all in one document; they are added to it
        query_positions [B, Q] int64    positions to return as [B, Q, D], repeats allowed; the last block
                                        computes only these; None: all. Not with dropout or a cache
        """
        if cache is not None:
            return self._hidden_states_after_cache(tokens, cache)
        documents = None
        if self.config.document_mask:
            assert self.config.eod_id is not None, "set by read.py"
            documents = document_numbers(tokens, self.config.eod_id)
            positions = positions_in_document(documents) if positions is None else positions
        drops = self.training and self.config.attention_dropout > 0
        assert dropout_key is not None or not drops, "attention dropout requires the samples' keys"
        # None for plain causal or full attention: a mask costs B S^2 bytes and excludes the fastest kernels
        mask = build_attention_mask(causal, documents, visible)
        x, cos, sin = self._embed_tokens(tokens, positions, first_position)
        for i, block in enumerate(self.blocks):
            key = derive_layer_key(dropout_key, i) if drops and dropout_key is not None else None
            # earlier blocks need all positions, since the next block attends to them
            last = i == len(self.blocks) - 1
            x = block(
                x,
                cos,
                sin,
                causal,
                mask=mask,
                dropout_key=key,
                query_positions=query_positions if last else None,
            )
        return self.norm(x)

    def _hidden_states_after_cache(self, tokens: Tensor, cache: KvCache) -> Tensor:
        """Return hidden states of the positions that follow the cache; causal."""
        x, n = self.embedding(tokens), tokens.shape[1]
        window = slice(cache.n_read, cache.n_read + n)
        cos, sin = cache.cos, cache.sin
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[window]
        elif cos is not None and sin is not None:
            cos, sin = cos[window], sin[window]
        # the window holds positions n_read .. n_read + n - 1; each layer attends to its cache and the window
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, cos, sin, True, cache=layer)
        # only after the last block: until then every layer writes at the same n_read
        cache.advance(n)
        return self.norm(x)

    def _embed_tokens(
        self, tokens: Tensor, positions: Tensor | None, first_position: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (embedded tokens [B, S, D], cos, sin).

        Learned positions are added, then cos and sin are None.
        """
        x, n = self.embedding(tokens), tokens.shape[1]
        if self.position_embedding is not None:
            table = self.position_embedding.weight
            assert positions is not None or n <= len(table), f"{n} positions, but the table has {len(table)}"
            return x + (table[:n] if positions is None else self.position_embedding(positions)), None, None
        d_head, theta = self.config.d_head, self.config.rope_theta
        if positions is None:
            return x, *rotary_table(n, d_head, theta, tokens.device, first_position)
        # a table per sample; the axis of size 1 broadcasts over the heads
        return x, *rotary_at_positions(positions[:, None], d_head, theta)  # [B, 1, S, K]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the rows of the embedding: [..., D] -> [..., V]."""
        return F.linear(hidden, self.head_weight)

    def forward(self, tokens: Tensor, causal: bool, **model_kwargs: Tensor) -> Tensor:
        """Map tokens int64 [B, S] to logits [B, S, V]; `model_kwargs` as for `hidden_states`."""
        return self.compute_logits(self.hidden_states(tokens, causal, **model_kwargs))
