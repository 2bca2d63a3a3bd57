"""Tensor and sequence parallelism: DTensor plans of the blocks and a vocabulary-parallel head.

Shoeybi et al., arXiv 1909.08053 (tensor parallel), Korthikanti et al., arXiv
2205.05198 (sequence parallel).
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, parallel

from megatron.model.transformer import Gpt, RmsNorm
from megatron.parallel.dtensor import to_local

POSITIONS = Shard(1)  # S in [B, S, D]
HEADS = 2  # dimension of H in [B, S, H, K]
Plan = dict[str, parallel.ParallelStyle]


def apply_tensor_parallel(model: Gpt, mesh: DeviceMesh) -> None:
    """Apply tensor parallelism to a model over a 1-D mesh, in place. Its parameters become DTensors.

    In a block, heads and feed-forward are split;
    in between, positions are split.
    """
    for block in model.blocks:
        parallel.parallelize_module(block, mesh, _plan_block(model))
    # the embedding gives each rank its positions, and the
    # norm keeps them; TensorVocabularyShard is the head
    top: Plan = {
        # each rank looks up the tokens in its rows and has
        # zeros for others; the reduce-scatter adds them
        "embedding": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=POSITIONS),
        "norm": parallel.SequenceParallel(use_local_output=True),
    }
    if model.unembedding is not None:
        top["unembedding"] = parallel.ColwiseParallel()
    parallel.parallelize_module(model, mesh, top)
    if model.position_embedding is not None:
        # every rank has the whole table and looks up its
        # positions: the first hook takes them from those of all ranks
        take = parallel.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=POSITIONS)
        parallel.parallelize_module(model.position_embedding, mesh, take)
        look_up = parallel.SequenceParallel(use_local_output=True)
        parallel.parallelize_module(model.position_embedding, mesh, look_up)
    model.tensor_rank = mesh.get_local_rank()


def _plan_block(model: Gpt) -> Plan:
    """Return the styles of the modules of a block."""
    # A bias of `out` and `down` is on every rank, and DTensor adds it to
    # the partial sum of one of them. The gradients of norms are those of a
    # rank's positions or heads, and summed where gradients are collected
    # (match_placements).
    norm = parallel.SequenceParallel(use_local_output=True)
    # Two all-gathers and two reduce-scatters per forward of a block:
    # positions -> all (before the projections), and partial
    # sums of all -> positions (after `out` and `down`).
    plan: Plan = {
        "attention_norm": norm,
        "attention": parallel.PrepareModuleInput(
            input_layouts=(POSITIONS, None), desired_input_layouts=(Replicate(), None)
        ),
        # weights [H K, D] are split by rows: each rank has
        # H / t heads, and attention needs no communication
        **{f"attention.{name}": parallel.ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": parallel.RowwiseParallel(output_layouts=POSITIONS),
        "mlp_norm": norm,
        "mlp": parallel.PrepareModuleInput(input_layouts=(POSITIONS,), desired_input_layouts=(Replicate(),)),
        "mlp.up": parallel.ColwiseParallel(),
        "mlp.down": parallel.RowwiseParallel(output_layouts=POSITIONS),
    }
    if model.config.feed_forward == "swiglu":
        plan["mlp.gate"] = parallel.ColwiseParallel()
    if model.config.qk_norm:
        all_heads = model.config.qk_norm_all_heads
        style = (
            NormOverRanks()
            if all_heads
            else parallel.SequenceParallel(sequence_dim=HEADS, use_local_output=True)
        )
        plan |= {f"attention.{name}_norm": style for name in ("query", "key")}
    return plan


class NormOverRanks(parallel.ParallelStyle):
    """Style of an RmsNorm over a split dimension: the sum of squares is reduced, the gain is split."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RmsNorm)
        # src_data_rank=None: no broadcast, every rank has the same gain
        gain = distribute_tensor(module.weight.detach(), device_mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(gain)
        normalize = partial(normalize_over_ranks, eps=module.eps, group=device_mesh.get_group())
        module.normalize = normalize  # type: ignore[method-assign]  # this module only
        return module


def normalize_over_ranks(x: Tensor, gain: Tensor, *, eps: float, group: dist.ProcessGroup) -> Tensor:
    """Return x / rms(x) * gain for this rank's part of the last axis; the mean is over all ranks.

    x [..., D / t], gain [D] as a DTensor or this rank's part of it
    """
    # a rank's squares affect the results of all ranks:
    # the gradient of this sum is a sum over ranks, too
    total = all_reduce(x.square().sum(-1, keepdim=True), group=group)
    return x * torch.rsqrt(total / (x.shape[-1] * group.size()) + eps) * to_local(gain)


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
        split = DTensor.from_local(hidden, self.mesh, [POSITIONS], run_check=False)
        # backward of an all-gather with Partial gradients:
        # a reduce-scatter over the ranks' vocabulary parts
        return split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
