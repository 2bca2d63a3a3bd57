"""What a run is: its settings, what follows from them, and the name of their sum."""
