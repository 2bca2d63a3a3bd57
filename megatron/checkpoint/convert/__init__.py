"""Conversion of checkpoints: Hugging Face, Megatron, llama2.c."""
