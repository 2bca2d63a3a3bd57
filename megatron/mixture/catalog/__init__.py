"""Catalog of documents and their properties in DuckDB, and queries over it."""
