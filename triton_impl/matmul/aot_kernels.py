"""Specialisations of the matmul kernels that tests compile ahead of time."""

from __future__ import annotations

from typing import Any

import triton

from triton_impl.matmul import descriptors, split_k
from triton_impl.matmul.naive import BLOCK_K, BLOCK_M, BLOCK_N, _matmul_naive_kernel
from triton_impl.matmul.persistent import _matmul_persistent_kernel
from triton_impl.matmul.split_k import _matmul_split_kernel, _matmul_split_sum_kernel
from triton_impl.matmul.sum_parts import BLOCK as SUM_PARTS_BLOCK
from triton_impl.matmul.sum_parts import _sum_parts_kernel
from triton_impl.matmul.tiled import _batched_matmul_kernel, _matmul_kernel
from triton_impl.matmul.tiles import CONFIGS
from triton_impl.matmul.tma import _matmul_tma_kernel
from triton_impl.runtime.aot import Entry, entry

_ROWS = {"stride_ak": 1, "stride_bn": 1}  # row-major operands
_COLUMNS = {"stride_am": 1, "stride_bk": 1}  # both transposed
EVEN = {"EVEN_M": True, "EVEN_N": True, "EVEN_K": True, "INT64_OFFSETS": False, "PRECISION": "ieee"}
MASKED = {"EVEN_M": False, "EVEN_N": False, "EVEN_K": False, "INT64_OFFSETS": True, "PRECISION": "ieee"}
_NAIVE = {"PRECISION": "ieee", "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K}
_FLOAT = {"partials_ptr": "*fp32"}


def descriptor_entry(
    kernel: Any, dtype: str, a_along_k: bool, b_along_k: bool, config: triton.Config, **more: Any
) -> Entry:
    """An entry of a kernel that takes descriptors."""
    block = config.kwargs
    m, n, k = block["BLOCK_M"], block["BLOCK_N"], block["BLOCK_K"]
    out = f"tensordesc<{dtype}[{m}, {n // block['SUBTILES']}]>"
    a, b = (m, k) if a_along_k else (k, m), (n, k) if b_along_k else (k, n)
    types = {
        "c": out,
        "product": out,
        "a": f"tensordesc<{dtype}[{a[0]}, {a[1]}]>",
        "b": f"tensordesc<{dtype}[{b[0]}, {b[1]}]>",
    }
    constants = {
        "A_ALONG_K": a_along_k,
        "B_ALONG_K": b_along_k,
        "A_BATCHED": False,
        "B_BATCHED": False,
        "DESCRIBED": True,
    }
    follows = {"HAS_BIAS": False, "ACTIVATION": None, "SAVE_PRODUCT": False}
    return entry(kernel, dtype, {**constants, **follows, **more}, config, types)


AOT = [
    entry(_matmul_naive_kernel, "bf16", {**_ROWS, **_NAIVE, "INT64_OFFSETS": False}),
    entry(_matmul_naive_kernel, "fp32", {**_COLUMNS, **_NAIVE, "INT64_OFFSETS": True}),
    *(entry(_matmul_kernel, "bf16", {**_ROWS, **EVEN}, config) for config in CONFIGS["16-bit"][:4]),
    entry(_matmul_kernel, "fp16", {**_COLUMNS, **MASKED}, CONFIGS["16-bit"][0]),
    entry(_matmul_kernel, "bf16", {**_ROWS, **MASKED}, CONFIGS["16-bit thin"][0]),
    entry(_matmul_kernel, "fp32", {**_ROWS, **EVEN, "PRECISION": "tf32"}, CONFIGS["tf32"][0]),
    entry(_matmul_kernel, "fp32", {**_ROWS, **EVEN}, CONFIGS["ieee"][0]),
    entry(_batched_matmul_kernel, "bf16", {**_ROWS, **MASKED}, CONFIGS["16-bit"][0]),
    *(
        descriptor_entry(kernel, "bf16", a_along_k, b_along_k, descriptors.CONFIGS[0])
        for kernel in (_matmul_tma_kernel, _matmul_persistent_kernel)
        for a_along_k in (True, False)
        for b_along_k in (True, False)
    ),
    *(descriptor_entry(_matmul_persistent_kernel, "fp16", True, False, each) for each in descriptors.CONFIGS[1:]),
    *(
        entry(_matmul_split_kernel, "bf16", {**_ROWS, **EVEN}, each, _FLOAT)
        for each in (split_k.CONFIGS[2], split_k.CONFIGS[5])
    ),
    entry(_matmul_split_kernel, "fp32", {**_COLUMNS, **MASKED}, split_k.FLOAT32[0]),
    entry(_matmul_split_sum_kernel, "bf16", {"BLOCK": split_k.SUM_BLOCK}, types=_FLOAT),
    entry(_sum_parts_kernel, "bf16", {"OTHERS": 7, "BLOCK": SUM_PARTS_BLOCK}),
]
