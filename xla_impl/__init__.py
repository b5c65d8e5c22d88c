"""The xla level: formulas in JAX, compiled as whole programs by XLA. JAX is an optional extra, ``kernel_ladder[xla]``.

Tensors pass by DLPack or as views of NumPy, without a copy where they are contiguous (:mod:`xla_impl.bridge`). A call
compiles once for each combination of shapes, dtypes and options (:mod:`xla_impl.rung`).
"""

from __future__ import annotations

import importlib.util
from importlib import metadata

from kernel_ladder import gpu

#: The oldest JAX whose interfaces this package uses: ``jax.enable_x64`` as a context, Pallas' Triton parameters.
OLDEST = (0, 10)


@gpu.cached
def unavailable() -> str | None:
    """Why JAX cannot be used here, or None. Imports nothing."""
    if importlib.util.find_spec("jax") is None:
        return "JAX is not installed; `pip install kernel_ladder[xla]` installs it, [xla-cuda13] for a GPU"
    version = metadata.version("jax")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"JAX {version} is too old; `pip install --upgrade kernel_ladder[xla]` installs {oldest} or newer"
    return None


def note() -> str | None:
    """What JAX runs on here, if that is less than PyTorch has."""
    import torch

    if torch.cuda.is_available() and not _has_cuda_plugin():
        return "on the CPU only: JAX's CUDA plugin is missing; `pip install kernel_ladder[xla-cuda13]` installs it"
    return None


def _has_cuda_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13))
