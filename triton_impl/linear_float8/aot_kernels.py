"""Specialisations of the kernels of `linear_float8` that tests compile ahead of time."""

from __future__ import annotations

import triton

from triton_impl.linear_float8 import persistent, tiled
from triton_impl.linear_float8.persistent import _linear_float8_persistent_kernel
from triton_impl.linear_float8.tiled import _linear_float8_kernel
from triton_impl.matmul.aot_kernels import EVEN, MASKED
from triton_impl.runtime.aot import Entry, entry

_ROWS = {"stride_ak": 1, "stride_bk": 1, "bias_stride": 1}
_SCALES = {"input_scale_ptr": "*fp32", "weight_scale_ptr": "*fp32"}
_E4M3 = {"a_ptr": "*fp8e4nv", "b_ptr": "*fp8e4nv", **_SCALES}
_PER_ROW = {"ROW_SCALES": True, "COLUMN_SCALES": True, "HAS_BIAS": True}
_PER_TENSOR = {"ROW_SCALES": False, "COLUMN_SCALES": False, "HAS_BIAS": False}


def _described(config: triton.Config, follows: dict[str, bool]) -> Entry:
    block = config.kwargs
    m, n, k = block["BLOCK_M"], block["BLOCK_N"], block["BLOCK_K"]
    types = {
        "c": f"tensordesc<bf16[{m}, {n // block['SUBTILES']}]>",
        "a": f"tensordesc<fp8e4nv[{m}, {k}]>",
        "b": f"tensordesc<fp8e4nv[{n}, {k}]>",
        **_SCALES,
    }
    constants = {"DESCRIBED": True, "bias_stride": 1, **follows}
    return entry(_linear_float8_persistent_kernel, "bf16", constants, config, types)


AOT = [
    *(entry(_linear_float8_kernel, "bf16", {**_ROWS, **EVEN, **_PER_ROW}, each, _E4M3) for each in tiled.CONFIGS[:4]),
    entry(_linear_float8_kernel, "fp16", {**_ROWS, **MASKED, **_PER_TENSOR}, tiled.CONFIGS[2], _E4M3),
    entry(_linear_float8_kernel, "bf16", {**_ROWS, **EVEN, **_PER_ROW}, tiled.THIN[3], _E4M3),
    entry(_linear_float8_kernel, "bf16", {**_ROWS, **EVEN, **_PER_ROW}, tiled.THIN[1], _E4M3),
    *(_described(each, _PER_ROW) for each in persistent.CONFIGS[:4]),
    _described(persistent.CONFIGS[0], _PER_TENSOR),
]
