"""Forward, backward, update."""
