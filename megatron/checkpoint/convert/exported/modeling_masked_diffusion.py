"""A masked-diffusion language model for transformers: Llama's, Qwen2's or Qwen3's shape, bidirectional.

model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
logits = model(input_ids).logits            # masked tokens are config.mask_token_id
text = model.generate(prompt_ids, max_new_tokens=64, steps=32)
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput


class MaskedDiffusionConfig(PretrainedConfig):
    """Keys of a Llama config.json and `n_tokens`: ids from n_tokens on are [MASK] and padding."""

    model_type = "megatron_masked_diffusion"

    def __init__(
        self,
        vocab_size: int = 128,
        n_tokens: int = 127,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.n_tokens, self.mask_token_id = vocab_size, n_tokens, n_tokens
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.rms_norm_eps, self.rope_theta = rms_norm_eps, rope_theta
        self.attention_bias, self.mlp_bias, self.qk_norm = attention_bias, mlp_bias, qk_norm
        self.qkv_bias = qkv_bias  # biases of query, key and value alone, as in Qwen2
        kwargs.pop("mask_token_id", None)
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)


class Norm(nn.Module):
    """RMSNorm: x / rms(x) * weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        # float32 also in a bfloat16 model: bfloat16 has only 8 significant bits
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Bidirectional self-attention, [B, S, D] -> [B, S, D]; `visible` [B, 1, 1, S]: keys to attend to."""

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        width, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head
        # heads H, key heads G, head width K: each key head serves H / G neighbouring query heads
        self.n_sharing = config.num_attention_heads // config.num_key_value_heads
        qkv_bias = bias or config.qkv_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * head, bias=qkv_bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head, bias=qkv_bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head, bias=qkv_bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head, width, bias=bias)
        self.q_norm = Norm(head, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(head, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None) -> Tensor:
        def split_heads(projected: Tensor) -> Tensor:
            # [B, S, H K] -> [B, S, H, K] -> [B, H, S, K]
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        def rotate(tensor: Tensor) -> Tensor:
            # Channels i and i + K / 2 are one pair (a, b), rotated to (a cos - b sin, b cos + a sin). cos and
            # sin [S, K] broadcast over [B, H, S, K].
            first, second = tensor.chunk(2, dim=-1)
            return (tensor * cos + torch.cat([-second, first], dim=-1) * sin).to(tensor.dtype)

        q, k = (
            rotate(self.q_norm(split_heads(self.q_proj(x)))),
            rotate(self.k_norm(split_heads(self.k_proj(x)))),
        )
        # [B, G, S, K] -> [B, H, S, K]: head h reads key head h // n_sharing
        k, v = (
            tensor.repeat_interleave(self.n_sharing, dim=1) for tensor in (k, split_heads(self.v_proj(x)))
        )
        # [B, H, S, K]; no causal mask: every position attends to all visible ones
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm transformer block: norm, attention, norm, feed-forward."""

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """The model without its head: token ids [B, S] -> hidden states [B, S, D]."""

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens: Tensor, visible: Tensor | None) -> Tensor:
        width, theta = self.config.head_dim, self.config.rope_theta
        # angles in float64: in float32 their error grows with the position
        pair = torch.arange(0, width, 2, dtype=torch.float64, device=tokens.device)
        positions = torch.arange(tokens.shape[1], dtype=torch.float64, device=tokens.device)
        # [S, 1] * [K / 2] -> [S, K / 2], repeated for both halves of a head -> [S, K]
        angle = (positions[:, None] * theta ** -(pair / width)).repeat(1, 2)
        cos, sin = angle.cos().float(), angle.sin().float()
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, visible)
        return self.norm(x)


class MaskedDiffusionLm(PreTrainedModel):
    """Predicts the masked tokens of a sequence from the others."""

    config_class = MaskedDiffusionConfig
    base_model_prefix = "model"
    # copy -> source: a saved model has only the embedding
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]  # without annotations in transformers

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> MaskedLMOutput:
        """Return logits [B, S, V]. attention_mask [B, S]: 0 at positions to ignore; labels: -100 ignored."""
        # [B, S] -> [B, 1, 1, S], broadcast over heads and queries
        visible = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        logits = self.lm_head(self.model(input_ids, visible))
        # mean over the labels that are not -100, cross_entropy's default ignore_index
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return MaskedLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int = 64, steps: int | None = None) -> Tensor:
        """Return [B, P + max_new_tokens] for input_ids [B, P].

        Each step predicts the most probable token at every masked position and keeps the most confident ones.
        """
        mask_id, steps = self.config.mask_token_id, steps or max_new_tokens
        tokens = F.pad(input_ids, (0, max_new_tokens), value=mask_id)
        # number of unmasked tokens after each step, as even as integers allow
        # example: 5 tokens in 2 steps: edges = [0, 2, 5], so 2 tokens are unmasked, then 3
        edges = [max_new_tokens * i // steps for i in range(steps + 1)]
        for first, end in zip(edges[:-1], edges[1:], strict=True):
            hidden = tokens == mask_id
            # Rows from n_tokens on are [MASK] and padding: they are cut off, so no step can predict [MASK].
            # Both results are [B, S].
            confidence, likeliest = (
                self(tokens).logits[..., : self.config.n_tokens].float().softmax(-1).max(-1)
            )
            # known positions get confidence -1, so topk selects masked ones
            most_confident = confidence.masked_fill(~hidden, -1).topk(end - first, dim=-1).indices
            # indices [B, end - first] -> mask [B, S]
            accepted = torch.zeros_like(hidden).scatter(-1, most_confident, True)
            tokens = torch.where(accepted, likeliest, tokens)
        return tokens
