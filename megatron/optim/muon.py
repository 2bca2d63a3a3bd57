"""Muon for the matrices of the blocks, AdamW for all other parameters."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import _muon

from megatron.config.schema import ModelConfig, OptimConfig
from megatron.optim.adamw import (
    MOMENTS,
    MUON_MOMENT,
    FusedAdamW,
    build_adamw,
    build_parameter_groups,
    fill_state,
    uses_muon,
)
from megatron.optim.ema import EMA

NS_COEFFICIENTS = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)  # of torch.optim.Muon


class Shards(Protocol):
    """Access to whole parameters of which each rank has a part; see RankWeights."""

    def gather_full(self, name: str, local: Tensor) -> Tensor:
        """Return the full tensor on every rank that holds a part of it. Collective over those ranks."""
        ...

    def slice_local(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor, without communication."""
        ...


class Muon(FusedAdamW):
    """Muon with Nesterov momentum for the groups with `is_muon`, AdamW for the others.

    The result of `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, on a CPU without its
    rounding to bfloat16 (Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., arXiv
    2502.16982): the orthogonalized momentum times 0.2 sqrt(max(rows, columns)). Its root mean
    square is that of AdamW's updates, so both share the learning rate and the weight decay.

    A matrix in shards is gathered, and each rank orthogonalizes the whole:
    the singular vectors of a part are not those of the matrix.
    """

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig, names: Mapping[nn.Parameter, str],
                 shards: Shards | None) -> None:  # fmt: skip
        """Create the optimizer.

        names    the parameters' names for `shards`
        shards   None: every parameter is whole on this rank
        """
        super().__init__(groups, (config.beta1, config.beta2))
        self.momentum, self.names, self.shards = config.momentum, names, shards

    def update_group(
        self, group: dict[str, Any], parameters: list[Any], divisor: Tensor, found_inf: Tensor
    ) -> None:
        """Update `parameters` of a group, which have gradients; the others as in `step`."""
        if not group["is_muon"]:
            super().update_group(group, parameters, divisor, found_inf)
            return
        # 0 for a skipped step: a factor on the
        # device, so the host does not read the flag
        applied = 1.0 - found_inf
        lr = applied * group.get("lr_tensor", group["lr"])
        for parameter in parameters:
            # 0 x NaN is NaN: the gradient of a skipped step is replaced
            gradient = torch.where(found_inf > 0, 0.0, parameter.grad / divisor)
            average = self.state[parameter][MUON_MOMENT].lerp_(gradient, applied * (1.0 - self.momentum))
            update, scale = self._orthogonalize(parameter, gradient.lerp(average, self.momentum))
            parameter.mul_(1.0 - lr * group["weight_decay"])
            parameter.sub_(update * (lr * scale))

    def _orthogonalize(self, parameter: nn.Parameter, part: Tensor) -> tuple[Tensor, float]:
        """Return this rank's part of the orthogonalized matrix, and the factor of the learning rate."""
        # in bfloat16 as torch.optim.Muon, which also halves the bytes of the gather; on
        # a CPU, whose products in bfloat16 are 50 times slower, in float32
        whole = part.bfloat16() if part.is_cuda else part.float()
        if self.shards is not None:
            whole = self.shards.gather_full(self.names[parameter], whole)
        scale = _muon._adjust_lr(1.0, "match_rms_adamw", whole.shape)
        whole = orthogonalize(whole)
        if self.shards is not None:
            whole = self.shards.slice_local(self.names[parameter], whole)
        return whole.to(parameter), scale


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix with singular values near 1 and the singular vectors of `matrix` [rows, columns].

    The Newton-Schulz iteration of torch.optim.Muon, which always
    computes in bfloat16, in the dtype of `matrix`.
    """
    a, b, c = NS_COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # the Gram matrix is of the shorter side
    x = x / x.norm().clamp(min=_muon.EPS)
    for _ in range(_muon.DEFAULT_NS_STEPS):
        gram = x @ x.T
        # (b G + c G^2) x + a x
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    config: OptimConfig,
    shape: ModelConfig,
    shards: Shards | None = None,
) -> FusedAdamW | torch.optim.Optimizer:
    """Build the optimizer of the torch engine for `step_optimizer`: FusedAdamW, Muon or apex's kernel.

    Raises the errors of `build_adamw`.
    """
    if config.kernel == "apex":
        return build_adamw(parameters, config, shape)
    groups = build_parameter_groups(parameters, config, shape)
    optimizer = FusedAdamW(groups, (config.beta1, config.beta2))
    if config.kind == "muon":
        names = {parameter: name for name, parameter in parameters.items()}
        optimizer = Muon(groups, config, names, shards)
    fill_state(optimizer)
    return optimizer


def list_shapes(config: OptimConfig, name: str, shape: torch.Size) -> dict[str, torch.Size]:
    """Return the full shapes of a parameter and of its entries in the optimizer's state, by kind."""
    is_muon = uses_muon(config, name, len(shape))
    kinds = ["weight", MUON_MOMENT] if is_muon else ["weight", *MOMENTS]
    kinds += [] if config.ema_decay is None else [EMA]
    shapes = dict.fromkeys(kinds, shape)
    return shapes if is_muon else {**shapes, "step": torch.Size(())}
