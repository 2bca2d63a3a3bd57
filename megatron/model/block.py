"""One pre-norm transformer block."""

from torch import Tensor, nn

from megatron.config.schema import ModelConfig
from megatron.model.attention import Attention, gather_positions
from megatron.model.kv_cache import LayerCache
from megatron.model.mlp import Mlp
from megatron.model.norm import build_residual_norm
from megatron.plan.parametrization import residual_multiplier


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = build_residual_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = build_residual_norm(config)
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
        query_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the block, [B, S, D] or [B, Q, D]; arguments as in Attention.forward."""
        options = {
            "mask": mask,
            "dropout_key": dropout_key,
            "cache": cache,
            "query_positions": query_positions,
        }
        attended = self.attention(self.attention_norm(x), cos, sin, causal, **options)
        # keys and values needed every position; from here on only the query positions are computed
        residual = x if query_positions is None else gather_positions(x, query_positions)
        x = residual + self._scale_branch(attended)
        return x + self._scale_branch(self.mlp(self.mlp_norm(x)))

    def _scale_branch(self, branch: Tensor) -> Tensor:
        return branch if self.multiplier == 1 else branch * self.multiplier
