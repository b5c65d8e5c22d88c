"""The loss of a linear layer: no rung yet. Its kernels are those of ``matmul`` and ``cross_entropy``, called apart."""
