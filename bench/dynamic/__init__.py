"""Calls of changing lengths: what each compiler does when a length is new, and what later calls cost."""
