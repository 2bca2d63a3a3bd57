"""Numerical parts of a fit: objective, solvers, priors, noise, profiles."""
