"""Matrix product compiled.

formula          Inductor fuses the products of the naive formula with their sum, so that no product reaches memory. It
                 sees a reduction, not a matrix product: no shared-memory tiles, no tensor cores.
default          `torch.matmul`: a call of cuBLAS, which the compiler leaves alone
reduce_overhead  `default` launched as a CUDA graph
max_autotune     Inductor's matrix-product templates in Triton timed against cuBLAS
"""

from __future__ import annotations

import math

import torch

from compile_impl import register
from torch_ref.matmul import builtin, naive, product_sizes

#: Most products that the fused reduction accepts. More would run for minutes.
FORMULA_LIMIT = 2**36


def formula_unsupported(input: torch.Tensor, other: torch.Tensor) -> str | None:
    batch, m, n, k = product_sizes(input.shape, other.shape)
    products = math.prod(batch) * m * n * k
    if products > FORMULA_LIMIT:
        return f"a fused reduction over {products:.1e} products, without tiles or tensor cores; the limit is 2^36"
    return None


register("matmul", builtin, formula=naive, formula_unsupported=formula_unsupported)
