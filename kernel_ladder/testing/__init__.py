"""Samples of each operation, and the check of a rung's agreement with float64."""
