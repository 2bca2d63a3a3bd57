"""Scaling studies of language models, from raw text to a fitted scaling law."""
