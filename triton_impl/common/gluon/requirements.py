"""What kernels in Gluon, Triton's language below Triton, ask of a machine: a Hopper GPU, and no interpreter."""

from __future__ import annotations

import torch

from kernel_ladder import gpu

#: The compute capability, as 90, that calls are traced for (aot.py), on tensors that are nowhere; else None.
traced_for: int | None = None


def _unless_hopper(major: int, minor: int) -> str | None:
    return None if major == 9 else f"needs a GPU of compute capability 9.0, this one has {major}.{minor}"


@gpu.cached
def _not_hopper(device: int) -> str | None:
    if not gpu.visible():  # kernels are looked into where they cannot run
        return None
    return _unless_hopper(*gpu.of(device).capability)


def here() -> str | None:
    """Why this machine runs no kernel in Gluon, or None."""
    if not gpu.visible():
        return "no CUDA GPU is visible, and Gluon, Triton's lower language, has no interpreter"
    return _unless_hopper(*gpu.current().capability)


def unsupported(x: torch.Tensor) -> str | None:
    """Why a kernel in Gluon cannot take a tensor, whatever its shape, or None."""
    if traced_for is not None:
        return _unless_hopper(*divmod(traced_for, 10))
    if not x.is_cuda:
        return f"Gluon, Triton's lower language, takes CUDA tensors alone, got {x.device.type}"
    return _not_hopper(x.get_device())
