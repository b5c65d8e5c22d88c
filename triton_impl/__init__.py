"""Triton level. Without a GPU the kernels run in Triton's interpreter: right, and slow."""

from __future__ import annotations

import functools
import os

import torch

# The interpreter is chosen when a kernel is decorated, so this must stand before any kernel's module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton

#: Read once, as a constant that torch.compile can trace.
_INTERPRETED = bool(triton.knobs.runtime.interpret)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return _INTERPRETED


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if not interpreted() and not torch.cuda.is_available():
        return "no GPU is visible and TRITON_INTERPRET=0 switches Triton's interpreter off"
    return None


def note() -> str | None:
    """What to know of this level here though it is available, or None."""
    return "interpreted on the CPU: for correctness, not for speed" if interpreted() else None


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """What every Triton kernel of this package asks of its inputs."""
    if inputs[0].dtype == torch.float64:
        return "float64 is supported at the torch and compile levels only"
    if not inputs[0].is_cuda and not interpreted():
        return f"Triton kernels take CUDA tensors, got {inputs[0].device.type}"
    return None
