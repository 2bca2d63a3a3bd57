"""Training data selected by its properties: the catalog, queries over it, and mixtures of domains."""
