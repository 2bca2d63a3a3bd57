"""Figures of a report, one module per kind."""
