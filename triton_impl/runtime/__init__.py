"""Host code around kernels: launch, launch cache, autotuning, ahead-of-time compilation, interpreter."""
