"""Fast paths, each behind one public function that chooses its implementation for device and dtype."""
