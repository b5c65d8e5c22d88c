"""Triton's interpreter, ahead-of-time compilation, autotuning."""
