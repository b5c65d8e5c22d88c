"""Matrix product compiled, from the naive formula and from PyTorch's own function.

default       Inductor fuses the products of the naive formula with their sum, so that no product reaches memory. It
              sees a reduction, not a matrix product: no shared-memory tiles, no tensor cores.
max_autotune  PyTorch's own function, with Inductor's matrix-product templates timed against cuBLAS
"""

from __future__ import annotations

import math

import torch

from compile_impl import compiled
from kernel_ladder.semantics.strides import last_offset
from kernel_ladder.table import register
from torch_ref.matmul import builtin, naive, product_sizes

#: Most products that the fused reduction accepts. More would run for minutes.
DEFAULT_LIMIT = 2**36


def _too_many_products(input: torch.Tensor, other: torch.Tensor) -> str | None:
    batch, m, n, k = product_sizes(input.shape, other.shape)
    products = math.prod(batch) * m * n * k
    if products > DEFAULT_LIMIT:
        return f"a fused reduction over {products:.1e} products, without tiles or tensor cores; the limit is 2^36"
    return None


def _gpu_only(input: torch.Tensor, other: torch.Tensor) -> str | None:
    if not input.is_cuda:
        return "max-autotune chooses among GPU kernels; on the CPU it is the same as the built-in"
    for name, x in (("input", input), ("other", other)):
        if last_offset(x) >= 2**31:
            return f"the compiler's templates have offsets of 32 bits; `{name}` reaches {last_offset(x)} elements"
    return None


register("matmul", "compile.default", forward=compiled(naive), unsupported=_too_many_products)
register(
    "matmul",
    "compile.max_autotune",
    # The mode without CUDA graphs: with them, the next call would overwrite a graph's outputs.
    forward=compiled(builtin, mode="max-autotune-no-cudagraphs"),
    unsupported=_gpu_only,
)
