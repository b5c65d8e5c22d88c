"""CUDA C++ level: the Python face of ``csrc``. Loads the extension and registers its operators' variants."""

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
    """The compiled module, or None where it was not built."""
    if importlib.util.find_spec("kernel_ladder._C") is None:
        return None
    return importlib.import_module("kernel_ladder._C")


def architectures() -> list[str]:
    """What the extension's kernels were compiled to: ``sm_90a`` is machine code, ``compute_80`` is PTX."""
    module = extension()
    return [] if module is None else module.architectures()


@gpu.cached
def unavailable() -> str | None:
    """Why CUDA variants cannot run here, or None."""
    if (module := extension()) is None:
        return not_built.reason()
    if not hasattr(module, "architectures"):
        return "the extension kernel_ladder._C is older than this package; run `pip install -e .` again"
    if not gpu.visible():
        return "no CUDA GPU is visible"
    reasons = [built_for.no_code(index) for index in range(gpu.count())]
    return reasons[0] if reasons and None not in reasons else None


def climb(op: str) -> list[str]:
    """The variants of an operation in the order of the climb, as the schema table in ``csrc/core/bindings.cpp`` has them."""
    module = extension()
    return [] if module is None else module.variants().get(op, [])


def unsupported(*inputs: torch.Tensor, **options: object) -> str | None:
    """What every CUDA kernel of this package asks of its inputs."""
    if not inputs[0].is_cuda:
        return f"CUDA kernels take CUDA tensors, got {inputs[0].device.type}"
    if inputs[0].dtype == torch.float64:
        return "float64 is supported at the torch and compile levels only"
    return built_for.no_code(inputs[0].get_device())


def wants_gradient(*inputs: torch.Tensor | None) -> bool:
    """Whether a call is to be differentiated: only then does its backward's need of memory count."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def fake_like(x: torch.Tensor) -> torch.Tensor:
    """What the operators allocate for a result like `x` (DenseLike in ``csrc/core/layout.cpp``), without data.

    The strides of `x` where it is dense in some order of its dimensions; row-major else, where ``torch.empty_like``
    would keep the order of what is not dense.
    """
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return x.new_empty(x.shape)
        expected *= size
    return torch.empty_like(x)


@gpu.cached
def not_hopper(device: int) -> str | None:
    """Why products by wgmma cannot run on a CUDA device, or None."""
    return unavailable() or built_for.without_wgmma(device)


#: Rows of a product, at most, for the steps named `skinny`.
SKINNY_ROWS = 16


def skinny_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    """Why the steps for at most 16 rows do not take ``input @ other``, `other` a matrix ``(K, N)``, or None."""
    if input.dtype not in (torch.float16, torch.bfloat16):
        return "takes float16 and bfloat16"
    if other.dim() != 2:
        return f"takes one matrix as `other`, got {other.dim()} dimensions"
    a, _ = as_matrices(input, other)
    if a.dim() != 2 or a.shape[0] > SKINNY_ROWS:
        return f"takes at most {SKINNY_ROWS} rows that lie at one stride, got shape {tuple(input.shape)}"
    (m, k), n = a.shape, other.shape[1]
    rows = a.stride(1) == 1 and (m == 1 or a.stride(0) % 8 == 0) and k % 8 == 0
    along_k = other.stride(0) == 1 and (n == 1 or other.stride(1) % 8 == 0)
    along_n = other.stride(1) == 1 and other.stride(0) % 8 == 0 and n % 8 == 0
    if not rows or not (along_k or along_n) or address(a) % 16 or address(other) % 16:
        return "needs rows that are dense and start on 16 bytes, of both operands"
    return None
