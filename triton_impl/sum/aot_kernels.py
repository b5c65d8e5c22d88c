"""Specialisations of the sum kernels that tests compile ahead of time."""

from __future__ import annotations

from typing import Any

from triton_impl.runtime.aot import Entry, entry
from triton_impl.sum.naive import BLOCK, _sum_naive_kernel
from triton_impl.sum.two_stage import _sum_columns_kernel, _sum_rows_kernel, _sum_strided_kernel


def _tiles(kernel: Any, dtype: str, block_o: int, block_r: int, loads: int, **more: Any) -> Entry:
    constants = {"FLOAT64": dtype == "fp32", "BLOCK_O": block_o, "BLOCK_R": block_r, "LOADS": loads}
    return entry(kernel, dtype, {**constants, **more})


AOT = [
    entry(_sum_naive_kernel, "bf16", {"BLOCK": BLOCK}),
    entry(_sum_naive_kernel, "fp32", {"BLOCK": BLOCK}),
    _tiles(_sum_rows_kernel, "bf16", 1, 1024, 8, DIVISIBILITY=16),
    _tiles(_sum_rows_kernel, "fp32", 8, 256, 1, DIVISIBILITY=16),
    _tiles(_sum_columns_kernel, "bf16", 128, 8, 8, DIVISIBILITY=16),
    _tiles(_sum_columns_kernel, "fp32", 64, 8, 4, DIVISIBILITY=16),
    _tiles(_sum_columns_kernel, "fp32", 16, 32, 4, DIVISIBILITY=16),
    _tiles(_sum_strided_kernel, "fp32", 4, 128, 8),
]
