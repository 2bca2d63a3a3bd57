"""Modeling code that is copied into exported model folders. It runs without this package."""
