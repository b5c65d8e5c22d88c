"""Whole blocks of our calls."""
