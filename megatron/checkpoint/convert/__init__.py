"""Conversion of checkpoints: Hugging Face, Megatron."""
