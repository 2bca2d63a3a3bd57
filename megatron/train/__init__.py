"""A training run, from its configuration to its result."""
