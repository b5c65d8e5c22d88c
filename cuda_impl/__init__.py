"""CUDA C++ level: the Python face of ``csrc``. Loads the extension and registers its operators' variants."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType

import torch

from cuda_impl import not_built
from kernel_ladder.matmul_shapes import as_matrices
from kernel_ladder.table import untraced


@functools.cache
def extension() -> ModuleType | None:
    """The compiled module, or None where it was not built."""
    if importlib.util.find_spec("kernel_ladder._C") is None:
        return None
    return importlib.import_module("kernel_ladder._C")


@functools.cache
def unavailable() -> str | None:
    """Why CUDA variants cannot run here, or None."""
    if extension() is None:
        return not_built.reason()
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible"
    return None


def climb(op: str) -> list[str]:
    """The variants of an operation in the order of the climb, as the schema table in ``csrc/bindings.cpp`` has them."""
    module = extension()
    return [] if module is None else module.variants().get(op, [])


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """What every CUDA kernel of this package asks of its inputs."""
    if not inputs[0].is_cuda:
        return f"CUDA kernels take CUDA tensors, got {inputs[0].device.type}"
    if inputs[0].dtype == torch.float64:
        return "float64 is supported at the torch and compile levels only"
    return None


def fake_like(x: torch.Tensor) -> torch.Tensor:
    """What the operators allocate for a result like `x` (DenseLike in ``csrc/layout.cpp``), without data.

    The strides of `x` where it is dense in some order of its dimensions; row-major else, where ``torch.empty_like``
    would keep the order of what is not dense.
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return x.new_empty(x.shape)
        expected *= size
    return torch.empty_like(x)


@untraced
@functools.cache
def not_hopper(device: int) -> str | None:
    """Why products by wgmma cannot run on a CUDA device, or None."""
    if (reason := unavailable()) is not None:
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    return None if major == 9 else f"wgmma needs a GPU of compute capability 9.0, this one has {major}.{minor}"


#: Rows of a product, at most, for the steps named `skinny`.
SKINNY_ROWS = 16


def skinny_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """Why the steps for at most 16 rows do not take ``input @ other``, `other` a matrix ``(K, N)``, or None."""
    if input.dtype not in (torch.float16, torch.bfloat16):
        return "takes float16 and bfloat16"
    if torch.compiler.is_compiling():
        return "needs to know where operands begin, which torch.compile does not while it traces"
    if other.dim() != 2:
        return f"takes one matrix as `other`, got {other.dim()} dimensions"
    a, _ = as_matrices(input, other)
    if a.dim() != 2 or a.shape[0] > SKINNY_ROWS:
        return f"takes at most {SKINNY_ROWS} rows that lie at one stride, got shape {tuple(input.shape)}"
    (m, k), n = a.shape, other.shape[1]
    rows = a.stride(1) == 1 and (m == 1 or a.stride(0) % 8 == 0) and k % 8 == 0
    along_k = other.stride(0) == 1 and (n == 1 or other.stride(1) % 8 == 0)
    along_n = other.stride(1) == 1 and other.stride(0) % 8 == 0 and n % 8 == 0
    if not rows or not (along_k or along_n) or a.data_ptr() % 16 or other.data_ptr() % 16:
        return "needs rows that are dense and start on 16 bytes, of both operands"
    return None
