"""Samples of each operation, and the agreement of a variant with float64."""
