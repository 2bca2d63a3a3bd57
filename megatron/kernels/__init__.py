"""Fast paths, each behind one function that chooses its implementation."""
