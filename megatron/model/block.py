"""One transformer block, norms before the branches."""

from torch import Tensor, nn

from megatron.config.schema import ModelConfig
from megatron.model.attention import Attention
from megatron.model.mlp import Mlp
from megatron.model.norm import RmsNorm


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RmsNorm(config.d_model, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, causal: bool) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, causal)
        return x + self.mlp(self.mlp_norm(x))
