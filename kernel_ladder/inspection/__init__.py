"""What a variant's kernels are: source, compiled code, registers, shared memory, launches."""
