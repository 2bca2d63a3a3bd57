"""Server and clients of mixtures over Arrow Flight."""
