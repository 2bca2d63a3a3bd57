"""Checkpoints: written atomically, verified when read, converted from and to other formats."""
