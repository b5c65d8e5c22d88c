"""What the xla level adds to plain JAX: time on the device, and the host's cost of passing tensors."""
