"""Rows of results: files, their order, merging, resuming."""
