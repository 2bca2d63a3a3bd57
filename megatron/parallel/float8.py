"""Matrix products of the blocks in float8, with torchao."""

import torch

from megatron.model.transformer import Gpt


def convert_to_float8(model: Gpt, device: torch.device) -> None:
    """Replace the linear layers of the blocks, in place. Names and weights are unchanged; so is the head.

    Raises ValueError if the device has no float8
    products or torchao is not installed.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    # Ada and Hopper are the first GPUs with float8 products
    if capability is None or capability < (8, 9):
        device_name = "the CPU" if capability is None else f"compute capability {capability}"
        raise ValueError(
            f"dist.float8: got {device_name}, expected a GPU of compute capability 8.9 or more. Omit the key."
        )
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise ValueError(
            "dist.float8: torchao is not installed. pip install torchao, or omit the key."
        ) from error
    for block in model.blocks:
        convert_to_float8_training(block)
