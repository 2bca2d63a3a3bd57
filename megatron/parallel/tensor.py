"""Matrices cut over ranks: DTensor plans, positions cut between the matrices, the vocabulary in shards.

Shoeybi et al., arXiv 1909.08053 (the cut), Korthikanti et al., arXiv 2205.05198 (sequence parallel).
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megatron.model.gpt import Gpt

POSITIONS = Shard(1)  # of [B, S, D]


def _plan_of_block() -> dict[str, nn.Module]:
    """Heads and feed-forward are cut; between them each rank holds its share of the positions."""
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(POSITIONS, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=POSITIONS),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(POSITIONS,), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=POSITIONS),
    }


def cut_matrices(model: Gpt, mesh: DeviceMesh) -> None:
    """Cut a built model over a 1-D mesh, in place. Its parameters become DTensors."""
    for block in model.blocks:
        parallelize_module(block, mesh, _plan_of_block())
    top = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=POSITIONS),
        "norm": SequenceParallel(),
    }
    parallelize_module(model, mesh, top)


class Vocabulary:
    """This rank's rows of the head, and sums over the others': what the loss calls a VocabularyShard."""

    def __init__(self, mesh: DeviceMesh, n_rows: int) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.first_row = n_rows // mesh.size() * mesh.get_local_rank()

    def largest(self, of_rows: Tensor) -> Tensor:
        """Elementwise over the ranks, in place."""
        dist.all_reduce(of_rows, dist.ReduceOp.MAX, group=self.group)
        return of_rows

    def total(self, of_rows: Tensor) -> Tensor:
        """Elementwise over the ranks, in place."""
        dist.all_reduce(of_rows, group=self.group)
        return of_rows

    def all_positions(self, hidden: Tensor) -> Tensor:
        """Share of the positions [B, S / n, D] -> all of them; gradients come back added over the shards."""
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, self.mesh, [POSITIONS], run_check=False)
        return hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
