"""Attention to keys in pages in CUDA C++: ``csrc/attention/paged.cu``."""
