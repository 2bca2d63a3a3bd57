"""Training objectives: how tokens become a prediction task, and the loss of that task."""
