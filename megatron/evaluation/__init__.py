"""Evaluation: held-out losses, downstream tasks, and text generation."""
