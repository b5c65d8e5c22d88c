"""A linear layer of float8 operands: no rung yet. wgmma takes such operands; `csrc` has 16-bit and tf32 mainloops."""
