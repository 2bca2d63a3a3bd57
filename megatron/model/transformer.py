"""The transformer: embedding, pre-norm blocks of attention and feed-forward layer, final norm and head.

Shapes: B samples, S positions, D = d_model, H heads of K = d_head channels, F = d_ff, V rows of the head.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.config.schema import ModelConfig
from megatron.kernels.attention import scaled_dot_product_attention
from megatron.kernels.dropout import attend_with_dropout, derive_layer_key, drop_hidden
from megatron.kernels.norm import rms_norm
from megatron.kernels.rotary import Rotary, apply_rotary, rotary_at_positions, rotary_table
from megatron.kernels.swiglu import swiglu
from megatron.model.attention_inputs import AttentionInputs, gather_positions
from megatron.model.kv_cache import KvCache
from megatron.model.masks import build_attention_mask, document_numbers, positions_in_document
from megatron.model.precision import Precision
from megatron.plan.parametrization import attention_multiplier, logit_multiplier, residual_multiplier

GELU_FORMS = {"gelu": "tanh", "gelu_exact": "none"}  # feed_forward -> `approximate` of F.gelu


class RmsNorm(nn.Module):
    """x / rms(x) * gain over the last axis, for any shape (Zhang and Sennrich, arXiv 1910.07467).

    `multiplier` is a constant factor of the result, not a parameter.
    `dtype` applies to the result and to the gain in use;
    None: the result has x's dtype, and the gain is used as it is.
    """

    def __init__(self, d_model: int, eps: float, multiplier: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps, self.multiplier = eps, multiplier
        self.dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        # Always float32: the mean square of a wide bf16 row loses digits.
        normed = self.normalize(x.float(), self.round_weight(self.weight))
        return (normed if self.multiplier == 1 else normed * self.multiplier).to(self.dtype or x.dtype)

    def round_weight(self, weight: Tensor) -> Tensor:
        """Return a weight rounded to `dtype`, as float32: FSDP and DeepSpeed keep no other copy of it."""
        return (weight if self.dtype is None else weight.to(self.dtype)).float()

    def normalize(self, x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, gain, self.eps)


class LayerNorm(RmsNorm):
    """(x - mean) / std * gain (+ bias) over the last axis (Ba et al., arXiv 1607.06450)."""

    def __init__(self, d_model: int, eps: float, bias: bool, multiplier: float = 1.0) -> None:
        super().__init__(d_model, eps, multiplier)
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def normalize(self, x: Tensor, gain: Tensor) -> Tensor:
        bias = None if self.bias is None else self.round_weight(self.bias)
        return F.layer_norm(x, gain.shape, gain, bias, self.eps)


def build_residual_norm(config: ModelConfig, multiplier: float = 1.0) -> RmsNorm | LayerNorm:
    """Build the residual-stream norm of a configuration."""
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, config.norm_eps, config.biases, multiplier)
    return RmsNorm(config.d_model, config.norm_eps, multiplier)


class Attention(nn.Module):
    """Causal or bidirectional multi-head self-attention, [B, S, D] -> [B, S, D], or [B, Q, D] for queries.

    With fewer key/value heads than query heads, adjacent query heads share one key/value head
    (grouped-query attention, Ainslie et al., arXiv 2305.13245).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, shared = config.n_heads * config.d_head, config.kv_heads * config.d_head
        self.d_head, qkv_biases = config.d_head, config.biases or config.qkv_biases
        self.scale = attention_multiplier(config)
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.d_model, heads, bias=qkv_biases)
        self.key = nn.Linear(config.d_model, shared, bias=qkv_biases)
        self.value = nn.Linear(config.d_model, shared, bias=qkv_biases)
        self.out = nn.Linear(heads, config.d_model, bias=config.biases)
        # before the rotary embedding; per head as in Qwen3
        # (arXiv 2505.09388), or over all heads as in OLMo 2
        self.norms_all_heads = config.qk_norm_all_heads
        widths = (heads, shared) if self.norms_all_heads else (config.d_head, config.d_head)
        norms = (RmsNorm(n, config.norm_eps) if config.qk_norm else nn.Identity() for n in widths)
        self.query_norm, self.key_norm = norms
        # softmax(scale q k^T) v with arguments (q, k, v,
        # causal, mask); replaced by context parallelism
        self.core_attention: Callable[..., Tensor] = partial(scaled_dot_product_attention, scale=self.scale)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        queries = x if inputs.query_positions is None else gather_positions(x, inputs.query_positions)
        # -1 and not n_heads: under tensor parallelism
        # the projections return the heads of this rank only
        q, k, v = self.query(queries), self.key(x), self.value(x)
        if self.norms_all_heads:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.d_head)) for y in (q, k, v))  # [B, S, H, K]
        if not self.norms_all_heads:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [B, H, S, K]
        if inputs.rotary is not None:
            q = apply_rotary(q, *(inputs.query_rotary or inputs.rotary))
            k = apply_rotary(k, *inputs.rotary)
        if inputs.cache is not None:
            # k is cached after its rotation: q . k depends
            # on the difference of two positions only
            k, v = inputs.cache.extend(k, v)
        if inputs.dropout_key is None or self.dropout == 0:
            attended = self.core_attention(q, k, v, inputs.causal, inputs.mask)
        else:
            attended = attend_with_dropout(
                q, k, v, self.scale, inputs.causal, inputs.mask, inputs.dropout_key, self.dropout,
                inputs.tensor_rank,
            )  # fmt: skip
        return self.out(attended.transpose(1, 2).flatten(-2))  # [B, H, S, K] -> [B, S, H K] -> [B, S, D]


class Mlp(nn.Module):
    """Feed-forward layer [B, S, D] -> [B, S, D] via F.

    down(silu(gate(x)) * up(x)) (SwiGLU; Shazeer, arXiv 2002.05202),
    or down(gelu(up(x))): GPT-2 has the tanh approximation of GELU, Pythia
    the exact form. With the other one, published weights give other logits.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gated, self.gelu = config.feed_forward == "swiglu", GELU_FORMS.get(config.feed_forward, "none")
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.biases) if gated else None
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.biases)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate=self.gelu))
        return self.down(swiglu(self.gate(x), self.up(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, D] -> [B, S, D], or [B, Q, D] for queries.

    Options: norms of the outputs, x + norm(attention(x)) (OLMo 2, arXiv 2501.00656); in parallel,
    x + attention(norm(x)) + mlp(norm'(x)) (GPT-NeoX, arXiv 2204.06745).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = build_residual_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = build_residual_norm(config)
        self.mlp = Mlp(config)
        self.multiplier = residual_multiplier(config)
        self.dropout = config.hidden_dropout
        self.norms_outputs, self.is_parallel = config.norm_placement == "output", config.parallel_residual

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        attended = self.attention(x if self.norms_outputs else self.attention_norm(x), inputs)
        if self.norms_outputs:
            attended = self.attention_norm(attended)
        # keys and values needed every position; from
        # here on only the query positions are computed
        residual = x if inputs.query_positions is None else gather_positions(x, inputs.query_positions)
        x = residual + self._scale_branch(self._drop(attended, inputs, 0))
        read = residual if self.is_parallel else x
        branch = self.mlp_norm(self.mlp(read)) if self.norms_outputs else self.mlp(self.mlp_norm(read))
        return x + self._scale_branch(self._drop(branch, inputs, 1))

    def _drop(self, branch: Tensor, inputs: AttentionInputs, place: int) -> Tensor:
        return drop_hidden(branch, inputs.dropout_key, place, self.dropout, inputs.tensor_rank)

    def _scale_branch(self, branch: Tensor) -> Tensor:
        return branch if self.multiplier == 1 else branch * self.multiplier


class Gpt(nn.Module):
    """A transformer for both objectives; by default of the Llama family with a tied embedding.

    On the meta device it is built without values.
    `initialization.init_weights` fills them in.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_rows, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        # the final norm contains the logit multiplier: the
        # fused loss multiplies by the plain head weight
        self.norm = build_residual_norm(config, logit_multiplier(config))
        self.position_embedding: nn.Embedding | None = None
        if config.positions == "learned":
            assert config.n_positions is not None, "set by read.py"
            self.position_embedding = nn.Embedding(config.n_positions, config.d_model)
        # a bias of the head is the column of a
        # channel that is always 1 (see `_read_out`)
        width, tied = config.d_model + config.head_bias, config.tied_embedding
        head = None if tied else nn.Linear(width, config.vocab_rows, bias=False)
        self.unembedding: nn.Linear | None = head
        self.precision: Precision | None = None
        self.tensor_rank = 0  # set by tensor parallelism

    def set_precision(self, precision: Precision) -> None:
        """Set the dtypes of training; without them, everything has the dtype of the weights."""
        self.precision = precision
        for module in self.modules():
            if isinstance(module, RmsNorm):
                module.dtype = precision.compute

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head [V, D]: the embedding's if they are tied."""
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
        stream: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head: tokens int64 [B, S] -> [B, S, D].

        positions       [B, S] int64    position of each token; None: consecutive from first_position, or
                                        counted from the start of each document
        visible         [B, S, S] bool  keys that each position may attend to; None: all
        dropout_key     [B] int64       key of each sample; dropout is applied in training only
        cache           tokens continue the cached positions,
                        all in one document; they are added to it
        query_positions [B, Q] int64    positions to return as [B, Q, D], repeats allowed;
                                        the last block computes only these;
                                        None: all. Not with dropout or a cache
        stream          [B, S, D]       residual stream of the previous pipeline stage; None: embed the tokens
        """
        if cache is not None:
            options = (positions, visible, dropout_key, query_positions)
            assert first_position == 0 and all(option is None for option in options), "not with a cache"
            return self._hidden_states_after_cache(tokens, cache)
        documents = None
        if self.config.document_mask:
            assert self.config.eod_id is not None, "set by read.py"
            documents = document_numbers(tokens, self.config.eod_id)
        mask = build_attention_mask(tokens, causal, documents, visible, positions, self.config)
        if documents is not None and positions is None:
            positions = positions_in_document(documents)
        drops = self.training and max(self.config.attention_dropout, self.config.hidden_dropout) > 0
        assert dropout_key is not None or not drops, "dropout requires the samples' keys"
        shifts = self.config.predicts_next  # the output of position p - 1 predicts position p, as in Dream
        if shifts and query_positions is not None:
            query_positions = (query_positions - 1).clamp(min=0)
        x = self._embed(tokens, positions, first_position) if stream is None else stream
        rotary = self._find_rotary(tokens, positions, first_position)
        if drops and dropout_key is not None and stream is None:
            # the key of the layer after the last block, which no block uses
            last = derive_layer_key(dropout_key, len(self.blocks))
            x = drop_hidden(x, last, 0, self.config.hidden_dropout, self.tensor_rank)
        inputs = AttentionInputs(causal, rotary, mask, tensor_rank=self.tensor_rank)
        for i, block in enumerate(self.blocks):
            if drops and dropout_key is not None:
                inputs = replace(inputs, dropout_key=derive_layer_key(dropout_key, i))
            # earlier blocks need all positions,
            # since the next block attends to them
            if query_positions is not None and i == len(self.blocks) - 1:
                inputs = inputs.select_queries(query_positions, tokens.shape[1])
            x = block(x, inputs)
        if shifts and query_positions is None:
            x = torch.cat([x[:, :1], x[:, :-1]], dim=1)
        return self._read_out(x)

    def _read_out(self, x: Tensor) -> Tensor:
        """Return the input of the head, with a channel of ones if the head has a bias."""
        return F.pad(self.norm(x), (0, 1), value=1.0) if self.config.head_bias else self.norm(x)

    def _hidden_states_after_cache(self, tokens: Tensor, cache: KvCache) -> Tensor:
        """Return hidden states of the positions that follow the cache; causal."""
        assert self.precision is None, "training has no cache"
        x, rotary = self._embed(tokens, None, cache.n_read), None
        if self.position_embedding is None:
            # one table for all steps of the cache
            cos, sin = rotary_table(cache.n_positions, self.config, tokens.device)
            window = slice(cache.n_read, cache.n_read + tokens.shape[1])
            rotary = cos[window], sin[window]
        # the first positions are plain causal attention;
        # later ones need the offset mask of the cache
        inputs = AttentionInputs(cache.n_read == 0, rotary, cache.build_mask(tokens.shape[1]))
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block(x, replace(inputs, cache=layer))
        # only after the last block: until then
        # every layer writes at the same n_read
        cache.advance(tokens.shape[1])
        return self._read_out(x)

    def _embed(self, tokens: Tensor, positions: Tensor | None, first: int) -> Tensor:
        """Return the residual stream before the first block: tokens int64 [B, S] -> [B, S, D].

        Training, generation with a cache and the first
        pipeline stage all embed with this function.
        """
        x, end = self.embedding(tokens), first + tokens.shape[1]
        x = x if self.precision is None else self.precision.to_residual(x)
        if self.position_embedding is None:
            return x
        if positions is None:
            assert end <= self.position_embedding.num_embeddings, f"{end} positions are more than its rows"
            positions = torch.arange(first, end, device=tokens.device)[None]
        rows = self.position_embedding(positions)  # [B or 1, S, D]
        return x + (rows if self.precision is None else self.precision.to_residual(rows))

    def _find_rotary(self, tokens: Tensor, positions: Tensor | None, first: int) -> Rotary | None:
        """Return cos and sin of the positions of tokens [B, S]; None with learned positions."""
        if self.config.positions == "learned":
            return None
        if positions is None:
            return rotary_table(tokens.shape[1], self.config, tokens.device, first)
        # a table per sample; the axis of size 1 broadcasts over the heads
        return rotary_at_positions(positions[:, None], self.config)  # [B, 1, S, K]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the rows of the embedding: [..., D] -> [..., V]."""
        return F.linear(hidden, self.head_weight)

    def forward(
        self,
        tokens: Tensor,
        causal: bool,
        *,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """Map tokens int64 [B, S] to logits [B, S, V]; arguments as for `hidden_states`."""
        return self.compute_logits(
            self.hidden_states(tokens, causal, positions=positions, visible=visible, dropout_key=dropout_key)
        )
