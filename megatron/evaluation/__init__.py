"""What a checkpoint is worth."""
