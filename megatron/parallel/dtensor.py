"""Local parts of tensors that may be DTensors.

Importing torch's DTensor takes half a second, so a run on one rank avoids it.
"""

import sys
from typing import Any, TypeGuard

from torch import Tensor, nn


def is_dtensor(tensor: Tensor | None) -> TypeGuard[Any]:
    """Return whether `tensor` is a DTensor. None exists before torch's module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; differentiable."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def match_placements(parameter: nn.Parameter) -> None:
    """Redistribute a DTensor gradient, in place, to the placements of its weight.

    Under sequence parallelism the gradients of norms have placement Partial:
    they still need to be summed.
    """
    grad = parameter.grad
    if is_dtensor(grad) and is_dtensor(parameter) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
