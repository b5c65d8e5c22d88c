"""The table, autograd, torch.compile, threads, other GPUs."""
