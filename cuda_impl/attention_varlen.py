"""Attention of packed sequences has no step in CUDA C++ yet: the level lists nothing for it."""
