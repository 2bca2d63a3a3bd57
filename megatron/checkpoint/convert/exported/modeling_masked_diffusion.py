"""A masked-diffusion language model for transformers: Llama's, Qwen2's or Qwen3's shape, bidirectional.

model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
logits = model(input_ids).logits            # masked tokens are config.mask_token_id
text = model.generate(prompt_ids, max_new_tokens=64, steps=32)
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

# keys of this file, which the configuration of a body does not have
KEYS_OF_CODE = ("model_type", "architectures", "auto_map", "qk_norm", "qkv_bias", "n_tokens", "objective")


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


def build_body(config: MaskedDiffusionConfig) -> nn.Module:
    """Return the body of Llama, Qwen2 or Qwen3: token ids [B, S] -> hidden states [B, S, D]."""
    kind = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    keys = {key: value for key, value in config.to_dict().items() if key not in KEYS_OF_CODE}
    # eager or sdpa: these implementations accept a
    # mask [B, 1, S, S] in place of the causal one
    return AutoModel.from_config(AutoConfig.for_model(kind, **keys), attn_implementation="sdpa")


class MaskedDiffusionLm(PreTrainedModel):
    """Predicts the masked tokens of a sequence from the others."""

    config_class = MaskedDiffusionConfig
    base_model_prefix = "model"
    # copy -> source: a saved model has only the embedding
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MaskedDiffusionConfig) -> None:
        super().__init__(config)
        self.model = build_body(config)
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
        n, length = input_ids.shape
        keys = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # [B, S] -> [B, 1, S, S]: every position attends to all visible ones
        visible = keys.bool()[:, None, None, :].expand(n, 1, length, length)
        states = self.model(input_ids, attention_mask=visible, use_cache=False).last_hidden_state
        logits = self.lm_head(states)
        # mean over the labels that are not -100,
        # cross_entropy's default ignore_index
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
            # Rows from n_tokens on are [MASK] and padding: they are cut
            # off, so no step can predict [MASK]. Both results are [B, S].
            confidence, likeliest = (
                self(tokens).logits[..., : self.config.n_tokens].float().softmax(-1).max(-1)
            )
            # known positions get confidence -1, so topk selects masked ones
            most_confident = confidence.masked_fill(~hidden, -1).topk(end - first, dim=-1).indices
            # indices [B, end - first] -> mask [B, S]
            accepted = torch.zeros_like(hidden).scatter(-1, most_confident, True)
            tokens = torch.where(accepted, likeliest, tokens)
        return tokens
