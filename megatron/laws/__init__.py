"""Scaling laws: forms, fits, intervals, frontiers, predictions. Needs numpy and scipy only."""
