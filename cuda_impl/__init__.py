"""The cuda level: the Python functions of ``csrc``. Loads the extension and registers its operators' rungs."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch

from cuda_impl import built_for, not_built
from kernel_ladder import gpu
from kernel_ladder.semantics.matmul_shapes import as_matrices
from kernel_ladder.tracing import address


@functools.cache
def extension() -> ModuleType | None:
    """The compiled module, or None if it was not built, or from an older table of operators."""
    found = importlib.util.find_spec("kernel_ladder._C")
    if found is None or not_built.is_stale(found.origin):
        return None
    return importlib.import_module("kernel_ladder._C")


def architectures() -> list[str]:
    """The targets that the extension's kernels were compiled for: ``sm_90a`` is machine code, ``compute_80`` PTX."""
    module = extension()
    return [] if module is None else module.architectures()


@gpu.cached
def unavailable() -> str | None:
    """Why the CUDA rungs cannot run on this machine, or None."""
    if (module := extension()) is None:
        found = importlib.util.find_spec("kernel_ladder._C")
        return not_built.reason() if found is None else not_built.STALE
    if not hasattr(module, "architectures"):
        return not_built.STALE
    if not gpu.visible():
        return "no CUDA GPU is visible"
    reasons = [built_for.no_code(index) for index in range(gpu.count())]
    return reasons[0] if reasons and None not in reasons else None


def climb(op: str) -> list[str]:
    """The rungs of an operation in reading order, from the schema table in ``csrc/core/bindings.cpp``."""
    module = extension()
    return [] if module is None else module.variants().get(op, [])


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """Why no CUDA kernel of this package takes these inputs, or None."""
    if not inputs[0].is_cuda:
        return f"CUDA kernels take CUDA tensors, got {inputs[0].device.type}"
    if inputs[0].dtype == torch.float64:
        return "float64 is supported at the torch, compile and xla levels only"
    return built_for.no_code(inputs[0].get_device())


def fake_like(x: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the layout that the operators allocate (DenseLike in ``csrc/core/layout.cpp``).

    It is dense, in the order that the dimensions of `x` have in memory; of an expanded `x`, row by row.
    """
    strides = x.stride()
    if x.is_contiguous() or any(size != 1 and stride == 0 for size, stride in zip(x.shape, strides, strict=True)):
        return x.new_empty(x.shape)
    dense, step = [0] * x.dim(), 1
    for d in sorted(range(x.dim()), key=lambda d: (strides[d], -d)):  # innermost first
        dense[d] = step
        step *= max(x.shape[d], 1)
    return x.new_empty_strided(x.shape, dense)


@gpu.cached
def not_hopper(device: int) -> str | None:
    """Why wgmma cannot run on a CUDA device, or None."""
    return unavailable() or built_for.without_wgmma(device)


#: Most rows that the rungs named `skinny` take.
SKINNY_ROWS = 16


def skinny_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """Why the `skinny` rungs do not take ``input @ other``, with a matrix `other` of shape ``(K, N)``, or None."""
    if input.dtype not in (torch.float16, torch.bfloat16):
        return "takes float16 and bfloat16"
    if other.dim() != 2:
        return f"takes one matrix as `other`, got {other.dim()} dimensions"
    a, _ = as_matrices(input, other)
    if a.dim() != 2 or a.shape[0] > SKINNY_ROWS:
        return f"takes at most {SKINNY_ROWS} rows with one stride between them, got shape {tuple(input.shape)}"
    (m, k), n = a.shape, other.shape[1]
    rows = a.stride(1) == 1 and (m == 1 or a.stride(0) % 8 == 0) and k % 8 == 0
    along_k = other.stride(0) == 1 and (n == 1 or other.stride(1) % 8 == 0)
    along_n = other.stride(1) == 1 and other.stride(0) % 8 == 0 and n % 8 == 0
    if not rows or not (along_k or along_n) or address(a) % 16 or address(other) % 16:
        return "needs dense rows that start at multiples of 16 bytes, in both operands"
    return None
