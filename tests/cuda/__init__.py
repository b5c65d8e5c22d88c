"""The CUDA level's kernels on a GPU."""
