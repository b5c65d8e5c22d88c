"""Which rung of the xla level to try first. Pallas kernels are interpreted on a CPU, and not measured yet on a GPU."""

from __future__ import annotations

from kernel_ladder.spec import Inputs, Options


def jit(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """XLA's own program: a library's kernel, or one that XLA writes and tunes."""
    return ("xla.jit",)


def attention(inputs: Inputs, options: Options) -> tuple[str, ...]:
    """On a GPU cuDNN's kernel where it takes the call, else XLA's own program."""
    return ("xla.fused", "xla.jit") if inputs[0].is_cuda else ("xla.jit",)


RULES = {("softmax", "xla"): jit, ("matmul", "xla"): jit, ("attention", "xla"): attention}
