"""Read the weights of DeepSpeed's universal checkpoints of a Megatron-DeepSpeed model.

    global_step100_universal/zero/NAME/fp32.pt               one float32 parameter, of all ranks
    global_step100_universal/mp_rank_00_model_states.pt      args, as in an ordinary checkpoint

NAME is the parameter in Megatron-DeepSpeed. A pipeline numbers its layers, `3.mlp.dense_h_to_4h.weight`, and
has the tied embedding under `tied_modules.embed`. The parameters are those of a single tensor rank.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.convert.megatron_names import name_pipeline_module
from megatron.checkpoint.convert.pickled_tensors import read_pickled_tensors

PARAMETERS, WEIGHTS = "zero", "fp32.pt"
PARAM, N_SUB_PARAMS = "param", "param_n_sub_params"  # keys of DeepSpeed in a file of a parameter


def is_universal_checkpoint(step: Path) -> bool:
    """Return whether a folder has the parameters of a universal checkpoint."""
    zero = step / PARAMETERS
    return zero.is_dir() and any((entry / WEIGHTS).is_file() for entry in zero.iterdir())


def read_universal(step: Path, args: Namespace) -> dict[str, Tensor]:
    """Return the parameters under Megatron-DeepSpeed's names, with layers of a pipeline as `layers.i`.

    Raises ValueError for a file without a tensor, and for gated layers whose halves are in an unknown order.
    """
    tensors: dict[str, Tensor] = {}
    for entry in sorted((step / PARAMETERS).iterdir()):
        if not (entry / WEIGHTS).is_file():
            continue
        content: Any = read_pickled_tensors(entry / WEIGHTS)
        record = content if isinstance(content, dict) else {PARAM: content}
        if not isinstance(record.get(PARAM), Tensor):
            raise ValueError(f"{entry / WEIGHTS}: got no tensor {PARAM!r}, expected a parameter of DeepSpeed")
        if ".dense_h_to_4h." in entry.name:
            _check_gate_order(entry, record, args)
        tensors[entry.name] = record[PARAM]
    return _number_pipeline_layers(tensors)


def _check_gate_order(entry: Path, record: dict[str, Any], args: Namespace) -> None:
    """Raise ValueError if the gate and up projections of several tensor ranks may be interleaved."""
    n_ranks = getattr(args, "tensor_model_parallel_size", None)
    # DeepSpeed joins the halves separately only if the run declared that there are two
    if getattr(args, "swiglu", False) and n_ranks != 1 and record.get(N_SUB_PARAMS) != 2:
        raise ValueError(
            f"{entry}: got a gated layer of {n_ranks} tensor ranks without the order of its halves, expected "
            f"{N_SUB_PARAMS} 2. Convert the checkpoint before it was made universal."
        )


def _number_pipeline_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Name the modules of a pipeline, which are numbered, by their kind."""
    modules: dict[int, dict[str, Tensor]] = {}
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        number, _, rest = name.partition(".")
        if number.isascii() and number.isdigit():
            modules.setdefault(int(number), {})[rest] = tensor
        else:
            named[name] = tensor
    n_blocks = 0
    # numbers count modules without parameters too: only their order is used
    for _, module in sorted(modules.items()):
        renamed = name_pipeline_module(module, n_blocks)
        n_blocks += any(name.startswith("layers.") for name in renamed)
        named |= renamed
    return named
