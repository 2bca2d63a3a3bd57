"""What a tensor has on this rank, whether or not it is a DTensor.

Importing torch's DTensor takes half a second, so a run on one rank does without it.
"""

import sys

from torch import Tensor, nn


def is_dtensor(tensor: Tensor | None) -> bool:
    """Whether it is a DTensor: there is none before its module was imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank; gradients flow back."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def lay_as_weight(parameter: nn.Parameter) -> None:
    """Let a gradient lie on the ranks as its weight does: DTensor leaves those of norms to be added up."""
    grad = parameter.grad
    if is_dtensor(grad) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)
