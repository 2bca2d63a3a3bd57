"""The transformer as single-GPU PyTorch.

It depends on a ModelConfig and tensors, not on ranks, meshes or files.
"""
