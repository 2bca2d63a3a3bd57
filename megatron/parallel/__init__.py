"""Many processes as one: who they are, and how they add up."""
