"""Tensor and sequence parallelism: DTensor plans of the blocks and a vocabulary-parallel head.

Shoeybi et al., arXiv 1909.08053 (tensor parallel), Korthikanti et al., arXiv
2205.05198 (sequence parallel).
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, parallel

from megatron.model.transformer import Gpt

POSITIONS = Shard(1)  # S in [B, S, D]


def apply_tensor_parallel(model: Gpt, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism to a model over a 1-D mesh, in place. Its parameters become DTensors.

    In a block, heads and feed-forward are split;
    in between, positions are split.
    """
    # Two all-gathers and two reduce-scatters per forward of a block:
    # positions -> all (before the projections), and partial
    # sums of all -> positions (after `out` and `down`).
    plan: dict[str, parallel.ParallelStyle] = {
        "attention_norm": parallel.SequenceParallel(),
        "attention": parallel.PrepareModuleInput(
            input_layouts=(POSITIONS, None), desired_input_layouts=(Replicate(), None)
        ),
        # weights [H K, D] are split by rows: each rank has
        # H / t heads, and attention needs no communication
        **{f"attention.{name}": parallel.ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": parallel.RowwiseParallel(output_layouts=POSITIONS),
        "mlp_norm": parallel.SequenceParallel(),
        "mlp": parallel.PrepareModuleInput(input_layouts=(POSITIONS,), desired_input_layouts=(Replicate(),)),
        "mlp.gate": parallel.ColwiseParallel(),
        "mlp.up": parallel.ColwiseParallel(),
        "mlp.down": parallel.RowwiseParallel(output_layouts=POSITIONS),
    }
    for block in model.blocks:
        parallel.parallelize_module(block, mesh, plan)
    # the embedding gives each rank its positions, and the
    # norm keeps them; TensorVocabularyShard is the head
    top = {
        # each rank looks up the tokens in its rows and has
        # zeros for others; the reduce-scatter adds them
        "embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=POSITIONS),
        "norm": parallel.SequenceParallel(),
    }
    parallel.parallelize_module(model, mesh, top)


class TensorVocabularyShard:
    """This rank's rows of the head and reductions over the other ranks; implements VocabularyShard."""

    def __init__(self, mesh: DeviceMesh, n_rows: int) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        # equal shares: the layout check refuses
        # vocab_rows that do not divide by the tensor size
        self.first_row = n_rows // mesh.size() * mesh.get_local_rank()

    def max_over_shards(self, values: Tensor) -> Tensor:
        """Elementwise over the ranks, in place."""
        # in place is safe: the callers pass new tensors
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Elementwise over the ranks, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def gather_sequence(self, hidden: Tensor) -> Tensor:
        """Gather positions [B, S / n, D] -> [B, S, D]; gradients are summed over the vocabulary shards."""
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, self.mesh, [POSITIONS], run_check=False)
        # backward of an all-gather with Partial gradients:
        # a reduce-scatter over the ranks' vocabulary parts
        return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
