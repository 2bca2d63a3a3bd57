"""The transformer, as one-GPU PyTorch: it takes a ModelConfig and tensors and knows no rank, mesh or file."""
