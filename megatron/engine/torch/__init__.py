"""Engine of plain PyTorch: FSDP2, tensor, context and pipeline parallelism."""
