"""What a model learns: how tokens become a task, and what its loss is."""
