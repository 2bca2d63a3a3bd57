"""Everything derived from settings: steps, tokens, counts of parameters and FLOPs, memory, identity hash."""
