"""Run torchtitan 0.3.0's trainer on a CPU: python torchtitan_on_cpu.py MIXTURE.yaml FOLDER STEPS [KILL_AFTER]

torchtitan supports accelerators only. Replaced are, for a CPU: the device and its memory statistics, the
kernel of flex attention (by a dense one with the mask that torchtitan derived from the positions, because the
backward pass of torch's is missing there), the barrier's device and a function that gloo lacks. Everything
else is torchtitan's: configuration, model, loss, optimizer, trainer, checkpoints.

Prints one JSON object: losses, and (samples so far, hash of inputs, labels and positions) of each batch. With
KILL_AFTER the process is killed when it has read that many batches. torchrun starts several ranks.
"""

import hashlib
import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import torch


def replace_accelerator() -> None:
    """Make torchtitan use the CPU. Call it before torchtitan is imported."""
    device = types.ModuleType("cpu_device")
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device"):
        setattr(device, name, lambda *_: None)
    device.device_count = lambda: 1
    device.current_device = lambda: 0
    device.get_device_name = lambda *_: "CPU"
    device.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 33)
    device.memory_stats = lambda *_: {}
    device.Event, device.Stream = torch.cpu.Event, torch.cpu.Stream
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda *_: device
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda *_, **__: barrier()
    torch.distributed.set_timeout = lambda *_: None


def replace_attention_kernel() -> None:
    """Replace the compiled kernel of flex attention by dense attention with the same mask."""
    from torch.nn.attention.flex_attention import AuxOutput, create_mask
    from torchtitan.models.common.attention import FlexAttention

    def attend(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
        # [B, 1, S, S]: may the query at the third index see the key at the fourth
        mask = create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        return out, AuxOutput()

    FlexAttention._compiled_flex_attn = staticmethod(attend)


def main(mixture: str, folder: str, steps: int, kill_after: int = 0) -> None:
    """Train for some steps, from the last checkpoint in the folder if there is one."""
    for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    n_ranks = int(os.environ["WORLD_SIZE"])
    replace_accelerator()
    from tokenizers import Tokenizer, models
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from megatron.mixture.source import titan_config

    replace_attention_kernel()
    assets = Path(folder) / "tokenizer"
    assets.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(assets / "tokenizer.json"))
    config = llama3_debugmodel()
    config.dataloader = titan_config(mixture, seed=3)
    config.hf_assets_path, config.dump_folder = str(assets), folder
    training = config.training
    training.seq_len, training.local_batch_size, training.steps = 32, 4 // n_ranks, steps
    config.training.disable_cuda_graphs = True
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.validator.enable = False
    config.debug.seed = 1  # otherwise each start has other initial weights
    config.activation_checkpoint = None
    if n_ranks > 1:
        # the default backend needs a later torch than 2.13
        config.parallelism.spmd_backend = "full_dtensor"
    trainer = config.build()
    for module in trainer.model_parts[0].modules() if n_ranks > 1 else ():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo only sums
    batches: list[tuple[int, str]] = []
    losses: list[float] = []
    forward_backward = trainer.forward_backward_step

    def record(**words: Any) -> torch.Tensor:
        inputs = words["input_dict"]
        if len(batches) == kill_after > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        content = [inputs["input"], inputs["positions"], words["labels"]]
        sums = hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in content)).hexdigest()
        batches.append((trainer.dataloader.next_sample, sums))
        loss = forward_backward(**words)
        losses.append(float(loss.detach().sum()))
        return loss

    trainer.forward_backward_step = record
    trainer.train()
    trainer.close()
    if os.environ["RANK"] == "0":
        print(json.dumps({"steps": trainer.step, "losses": losses, "batches": batches}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
