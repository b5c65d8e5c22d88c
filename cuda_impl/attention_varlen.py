"""Attention of packed sequences in CUDA C++: no variant yet."""
