"""A linear layer in CUDA C++: ``csrc/matmul/``."""
