"""The XLA level: how tensors pass to JAX and back."""
