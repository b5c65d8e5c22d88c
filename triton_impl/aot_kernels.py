"""Specialisations that tests compile ahead of time, of the operations that are one file each."""

from __future__ import annotations

import triton

from triton_impl import add, bias_gelu, dropout, gelu, linear, linear_cross_entropy, rope, swiglu
from triton_impl.attention.aot_kernels import AOT_PAGED, AOT_VARLEN
from triton_impl.common.column_sum import sum_partials_kernel, sum_tile, sum_warps
from triton_impl.matmul import descriptors
from triton_impl.matmul.aot_kernels import EVEN, MASKED, descriptor_entry
from triton_impl.matmul.persistent import _matmul_persistent_kernel
from triton_impl.matmul.tiles import CONFIGS
from triton_impl.runtime.aot import entry

ADD = [
    entry(add._add_kernel, "bf16", {"BLOCK": add.BLOCK}),
    entry(add._add_row_kernel, "bf16", {"DIVISIBILITY": 16, "BLOCK_M": 2, "BLOCK_N": add.MAX_COLUMNS}),
    entry(add._add_strided_kernel, "fp32", {"BLOCK": add.BLOCK}),
]

GELU = [
    *(
        entry(kernel, "bf16", {"TANH": tanh, "BLOCK": gelu.BLOCK})
        for kernel in (gelu._gelu_kernel, gelu._gelu_backward_kernel)
        for tanh in (True, False)
    ),
    *(
        entry(kernel, "fp32", {"TANH": False, "BLOCK": gelu.BLOCK})
        for kernel in (gelu._gelu_strided_kernel, gelu._gelu_backward_strided_kernel)
    ),
]

_ROWS = dict.fromkeys(("size1", "size2", "size3", "o_step", "i_step", "bias_step"), 1)
_FORWARD_TILE, _BACKWARD_TILE = (
    dict(zip(("BLOCK_M", "BLOCK_N"), bias_gelu._tile(4096, *sizes), strict=True))
    for sizes in (
        (bias_gelu.FORWARD_TILE, bias_gelu.FORWARD_COLUMNS),
        (bias_gelu.BACKWARD_TILE, bias_gelu.BACKWARD_COLUMNS),
    )
)
_FORWARD_WARPS = triton.Config({}, num_warps=bias_gelu.FORWARD_WARPS)
_BACKWARD_WARPS = triton.Config({}, num_warps=bias_gelu.BACKWARD_WARPS, maxnreg=bias_gelu.BACKWARD_REGISTERS)
_FLOAT = {"partials_ptr": "*fp32"}

BIAS_GELU = [
    *(
        entry(
            bias_gelu._bias_gelu_kernel,
            "bf16",
            {"DIVISIBILITY": 16, "TANH": tanh, **_FORWARD_TILE},
            _FORWARD_WARPS,
        )
        for tanh in (True, False)
    ),
    *(
        entry(
            bias_gelu._bias_gelu_backward_kernel,
            "bf16",
            {"DIVISIBILITY": 16, "TANH": tanh, **_BACKWARD_TILE},
            _BACKWARD_WARPS,
            _FLOAT,
        )
        for tanh in (True, False)
    ),
    entry(bias_gelu._bias_gelu_strided_kernel, "bf16", {"TANH": False, **_FORWARD_TILE, **_ROWS}, _FORWARD_WARPS),
    entry(
        bias_gelu._bias_gelu_backward_strided_kernel,
        "bf16",
        {"TANH": False, **_BACKWARD_TILE, **_ROWS, "g_step": 1},
        _BACKWARD_WARPS,
        _FLOAT,
    ),
    entry(
        sum_partials_kernel,
        "bf16",
        {"DIVISIBILITY": 16, **dict(zip(("BLOCK_M", "BLOCK_N"), sum_tile(1000), strict=True))},
        triton.Config({}, num_warps=sum_warps(1000)),
        _FLOAT,
    ),
]

_TILE = {"BLOCK_M": 1, "BLOCK_N": swiglu.BLOCK, "size1": 1, "size2": 1, "size3": 1}
_STEPS = ("o_step", "g_step", "u_step")
_GRADIENT_STEPS = ("gg_step", "gu_step", "gr_step", "g_step", "u_step")

SWIGLU = [
    entry(swiglu._swiglu_kernel, "bf16", {"BLOCK": swiglu.BLOCK}),
    entry(swiglu._swiglu_backward_kernel, "bf16", {"BLOCK": swiglu.BLOCK}),
    entry(swiglu._swiglu_rows_kernel, "bf16", {**_TILE, **dict.fromkeys(_STEPS, 1)}),
    entry(swiglu._swiglu_backward_rows_kernel, "bf16", {**_TILE, **dict.fromkeys(_GRADIENT_STEPS, 1)}),
]

_ROPE = {
    **{"BLOCK_M": 16, "BLOCK_N": 64, "HEADS": rope.HEADS},
    **dict.fromkeys(("size1", "size2", "size3", "o_step", "x_step"), 1),
}

_NO_OFFSETS = dict.fromkeys(("offsets_ptr", "offset", "table_rows", "sequence_heads"))
ROPE = [
    entry(
        rope._rope_kernel,
        dtype,
        {**_ROPE, **offsets, "INTERLEAVED": form, "BACKWARD": form},
        types={"table_ptr": "*fp32", **({} if offsets else {"offsets_ptr": "*i32"})},
    )
    for offsets in (_NO_OFFSETS, {})
    for dtype in ("bf16", "fp32")
    for form in (False, True)
]

_SCALE = {"scale": "fp32"}

DROPOUT = [
    entry(dropout._dropout_kernel, "bf16", {"EVEN": True, "BLOCK": dropout.BLOCK, "VECTOR": 8}, types=_SCALE),
    entry(dropout._dropout_kernel, "fp32", {"EVEN": False, "BLOCK": dropout.BLOCK, "VECTOR": 4}, types=_SCALE),
    entry(dropout._dropout_strided_kernel, "bf16", {"BLOCK": dropout.BLOCK}, types=_SCALE),
]

_LAYER = {"stride_ak": 1, "stride_bk": 1, "bias_stride": 1}  # rows of input and of weight dense
_GELU = {"HAS_BIAS": True, "ACTIVATION": "none", "SAVE_PRODUCT": False}
_TANH_SAVED = {"HAS_BIAS": True, "ACTIVATION": "tanh", "SAVE_PRODUCT": True}

LINEAR = [
    *(entry(linear._linear_kernel, "bf16", {**_LAYER, **EVEN, **_GELU}, config) for config in CONFIGS["16-bit"][:4]),
    entry(linear._linear_kernel, "bf16", {**_LAYER, **EVEN, **_TANH_SAVED}, CONFIGS["16-bit"][0]),
    entry(linear._linear_kernel, "fp16", {**_LAYER, **MASKED, **_TANH_SAVED}, CONFIGS["16-bit"][5]),
    entry(linear._linear_kernel, "bf16", {**_LAYER, **MASKED, **_GELU}, CONFIGS["16-bit thin"][0]),
    entry(linear._linear_kernel, "fp32", {**_LAYER, **EVEN, **_GELU}, CONFIGS["ieee"][0]),
    *(
        descriptor_entry(_matmul_persistent_kernel, "bf16", True, True, each, **_GELU)
        for each in descriptors.CONFIGS[:5]
    ),
    descriptor_entry(_matmul_persistent_kernel, "fp16", True, True, descriptors.CONFIGS[0], **_TANH_SAVED),
]

_COLUMN_MAJOR_A = {**EVEN, "stride_am": 1, "stride_bn": 1}
LINEAR_CROSS_ENTROPY = [
    entry(linear_cross_entropy._add_product_kernel, "bf16", _COLUMN_MAJOR_A, CONFIGS["16-bit"][0]),
    entry(linear_cross_entropy._add_product_kernel, "fp32", _COLUMN_MAJOR_A, CONFIGS["ieee"][0]),
    descriptor_entry(linear_cross_entropy._add_product_persistent_kernel, "bf16", False, False, descriptors.CONFIGS[0]),
    entry(
        linear_cross_entropy._scale_kernel,
        "bf16",
        {"MEAN": True, "BLOCK": linear_cross_entropy.BLOCK},
        None,
        {"grad_ptr": "*fp32", "count_ptr": "*fp32"},
    ),
]

AOT = {
    "add": ADD,
    "gelu": GELU,
    "bias_gelu": BIAS_GELU,
    "rope": ROPE,
    "swiglu": SWIGLU,
    "dropout": DROPOUT,
    "linear": LINEAR,
    "linear_cross_entropy": LINEAR_CROSS_ENTROPY,
    "attention_varlen": AOT_VARLEN,
    "attention_paged": AOT_PAGED,
}
