"""Forward and backward of the whole model on every rank: alone, with copies (DDP) or with shards (FSDP2)."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megatron.config.schema import DistConfig
from megatron.engine.task_loss import TaskLoss
from megatron.objective.base import Task
from megatron.parallel.mesh import Mesh
from megatron.parallel.world import World


class WholeModel:
    """What `TorchEngine` asks for gradients where no pipeline cuts the model."""

    def __init__(
        self, task_loss: TaskLoss, config: DistConfig, dtype: torch.dtype, world: World, mesh: Mesh
    ) -> None:
        self.model, self.stage = task_loss.model, config.sharding_stage
        self.copied: frozenset[str] = frozenset()
        self.has_loss = world.coordinate.tensor == 0  # the others hold the same nats: they count once
        # DDP and FSDP divide what they add up
        n_added = world.layout.data * world.layout.context
        self.divisor = n_added
        self.root: nn.Module = task_loss
        self.autocast = dtype if mesh.fsdp is None else torch.float32
        self.is_sharded = mesh.fsdp is not None
        if mesh.fsdp is not None:
            from megatron.parallel import fsdp

            self.divisor = fsdp.divisor(mesh.fsdp)
            fsdp.shard(
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
        """Under the one-GPU model's names."""
        return dict(self.model.named_parameters())

    def backward(self, tasks: Sequence[Task], share: Tensor) -> Tensor:
        """Leave the gradient of share * nats, summed over all ranks; gives the nats of this rank, float64."""
        share = share * self.divisor
        total = torch.zeros((), dtype=torch.float64, device=share.device)
        self.root.train()
        for i, task in enumerate(tasks):
            last = i == len(tasks) - 1
            waits = nullcontext()
            if isinstance(self.root, DistributedDataParallel) and not last:
                waits = self.root.no_sync()
            elif self.is_sharded:
                from megatron.parallel import fsdp

                fsdp.prepare_microbatch(self.root, self.stage, last)
            with waits:
                nats = self.root(task)
                (nats * share).backward()
            total += nats.detach()
        return total

    def score(self, task: Task) -> Tensor:
        """Nats of each sample, float64 [B]."""
        self.root.eval()
        forward = self.root.module if isinstance(self.root, DistributedDataParallel) else self.root
        nats = forward(task, each_sample=True)
        if self.is_sharded:
            from megatron.parallel import fsdp

            fsdp.let_go(self.root)
        return nats
