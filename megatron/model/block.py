"""One transformer block, norms before the branches."""

from torch import Tensor, nn

from megatron.config.parametrization import residual_multiplier
from megatron.config.schema import ModelConfig
from megatron.model.attention import Attention, taken
from megatron.model.cache import LayerCache
from megatron.model.mlp import Mlp
from megatron.model.norm import residual_norm


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = residual_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = residual_norm(config)
        self.mlp = Mlp(config)
        self.multiplier = residual_multiplier(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        causal: bool,
        *,
        mask: Tensor | None = None,
        dropout_key: Tensor | None = None,
        cache: LayerCache | None = None,
        asked: Tensor | None = None,
    ) -> Tensor:
        """As Attention.forward."""
        reading = {"mask": mask, "dropout_key": dropout_key, "cache": cache, "asked": asked}
        mixed = self.attention(self.attention_norm(x), cos, sin, causal, **reading)
        x = (x if asked is None else taken(x, asked)) + self._scaled(mixed)
        return x + self._scaled(self.mlp(self.mlp_norm(x)))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.multiplier == 1 else branch * self.multiplier
