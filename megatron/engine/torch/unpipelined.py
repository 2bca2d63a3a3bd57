"""Forward and backward passes without a pipeline: on a single rank, replicated (DDP) or sharded (FSDP2)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron.config.schema import DistConfig
from megatron.engine.task_loss import TaskLoss
from megatron.objective.task import Task
from megatron.parallel.mesh import Mesh
from megatron.parallel.world import World


class UnpipelinedModel:
    """The `Passes` of a model with all blocks on every rank."""

    def __init__(
        self, task_loss: TaskLoss, config: DistConfig, dtype: torch.dtype, world: World, mesh: Mesh
    ) -> None:
        self.model, self.stage = task_loss.model, config.sharding_stage
        self.duplicated: frozenset[str] = frozenset()
        self.has_loss = world.coordinate.tensor == 0  # tensor ranks compute the same nats: one of them counts
        # DDP averages over these ranks; multiplying the
        # loss by their number gives a sum, as FSDP does
        self.divisor = 1 if mesh.fsdp is not None else world.layout.data * world.layout.context
        self.root: nn.Module = task_loss
        self.autocast = dtype if mesh.fsdp is None else torch.float32
        self.is_sharded = mesh.fsdp is not None
        if mesh.fsdp is not None:
            from megatron.parallel import fsdp

            fsdp.shard_model(
                task_loss,
                self.model.blocks,
                mesh.fsdp,
                stage=self.stage,
                dtype=dtype,
                cpu_offload=config.cpu_offload,
            )
        elif mesh.samples is not None:
            self.root = DistributedDataParallel(
                task_loss, process_group=mesh.samples, gradient_as_bucket_view=True
            )

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters under the single-GPU model's names."""
        return dict(self.model.named_parameters())

    def backward(self, tasks: Sequence[Task], share: Tensor) -> Tensor:
        """Set .grad to the gradient of share * nats over all ranks; return this rank's nats, float64."""
        share = share * self.divisor
        total = torch.zeros((), dtype=torch.float64, device=share.device)
        self.root.train()
        for i, task in enumerate(tasks):
            last = i == len(tasks) - 1
            # gradients are reduced over ranks with the last
            # microbatch only. With k microbatches, reducing after
            # each would send k times as many bytes for the same sum
            sync_context: AbstractContextManager[None] = nullcontext()
            if isinstance(self.root, DistributedDataParallel) and not last:
                sync_context = self.root.no_sync()
            elif self.is_sharded:
                from megatron.parallel import fsdp

                fsdp.prepare_microbatch(self.root, self.stage, last)
            with sync_context:
                nats = self.root(task)
                (nats * share).backward()
            total += nats.detach()
        return total

    def score(self, task: Task) -> Tensor:
        """Return the nats of each sample, float64 [B]."""
        self.root.eval()
        forward = self.root.module if isinstance(self.root, DistributedDataParallel) else self.root
        nats = forward(task, per_sample=True)
        if self.is_sharded:
            from megatron.parallel import fsdp

            fsdp.reshard(self.root)
        return nats
