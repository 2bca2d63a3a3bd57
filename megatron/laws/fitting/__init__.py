"""Numerical parts of a fit: objective, solvers, noise, tests."""
