"""Read the tensors of Megatron core's `torch_dist` checkpoints, for any parallel layout that wrote them.

    iter_0000100/.metadata, __0_0.distcp, ...   tensors in torch's distributed format
    iter_0000100/common.pt                      args and counters

A tensor of a layer is stored as one tensor over all layers, `decoder.layers.mlp.linear_fc2.weight` [L, D, F],
or, of layers that differ, with the number of the layer. The tensors are those of a single tensor rank.
"""

import re
from argparse import Namespace
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.convert.dcp_folder import read_dcp_tensors
from megatron.checkpoint.convert.megatron_args import get_args
from megatron.checkpoint.convert.pickled_tensors import read_pickled_tensors
from megatron.checkpoint.layout import METADATA

COMMON = "common.pt"
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "rotary_pos_emb.")
# a tensor of all layers: no number after "layers."
STACKED = re.compile(r"(decoder\.layers)\.(?!\d+\.)(.+)")


def is_torch_dist_checkpoint(step: Path) -> bool:
    """Return whether a folder is a checkpoint of Megatron core's torch_dist format."""
    return (step / METADATA).is_file() and (step / COMMON).is_file()


def read_torch_dist(step: Path) -> tuple[Namespace, dict[str, Tensor]]:
    """Return args and the model's tensors under the names of Megatron core, one per layer.

    Raises ValueError for a damaged checkpoint and for one without args.
    """
    args = get_args(read_pickled_tensors(step / COMMON), step / COMMON)
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_dcp_tensors(step, _is_model_tensor).items():
        match = STACKED.fullmatch(name)
        if match is None:
            tensors[name] = tensor
            continue
        if not tensor.ndim:
            raise ValueError(f"{step}: {name}: got a single number, expected one tensor per layer")
        tensors |= {f"{match[1]}.{i}.{match[2]}": layer for i, layer in enumerate(tensor)}
    return args, tensors


def _is_model_tensor(name: str) -> bool:
    """Return whether a name is that of a weight; others are of the optimizer, or are no tensors."""
    return name.startswith(MODEL_KEYS) and "_extra_state" not in name
