"""``python -m bench profile``: kernels, operators and hardware counters of one call."""
