"""How weights move: the optimizer and the learning rate over time."""
