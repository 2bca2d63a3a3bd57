"""Processes that train the runs of a study: local and Slurm."""
