"""Optimizer and learning rate schedule."""
