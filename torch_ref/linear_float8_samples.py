"""Calls of `linear_float8` for the tests, bad ones, and the sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernel_ladder.semantics.float8 import FLOAT8, scale_shape
from kernel_ladder.spec import Case, ErrorCase

_KINDS = {0: "float8", 1: "float8", 2: "scale", 3: "scale", 4: "bias"}
_ROW, _TENSOR, _MIXED = ("row", "row"), ("tensor", "tensor"), ("tensor", "row")


def _case(
    id: str,
    input: tuple[int, ...],
    n: int,
    scales: tuple[str, str] = _ROW,
    out_dtype: str = "bfloat16",
    *,
    bias: bool = True,
    **more: Any,
) -> Case:
    weight = (n, input[-1])
    of_input, of_weight = (
        scale_shape(shape) if each == "row" else () for shape, each in zip((input, weight), scales, strict=True)
    )
    shapes = (input, weight, of_input, of_weight, (n,) if bias else None)
    return Case(id, shapes, {"out_dtype": out_dtype}, kinds=_KINDS, **more)


def cases() -> list[Case]:
    single, half = "float32", "float16"
    return [
        _case("prime", (37, 53), 41),
        _case("prime-float32", (37, 53), 41, out_dtype=single),
        _case("vector", (7,), 5, out_dtype=half),
        _case("aligned", (48, 160), 80, _TENSOR, bias=False),
        _case("one", (1, 1), 1, _TENSOR, single),
        _case("tile+1", (65, 129), 33, _MIXED, single),
        _case("empty-m", (0, 5), 3),
        _case("empty-n", (4, 5), 0, _TENSOR),
        _case("empty-k", (4, 0), 6, _MIXED, half),
        _case("long-k", (3, 1021), 5, out_dtype=single, bias=False),
        _case("3d", (2, 19, 24), 23, _TENSOR, half),
        _case("column", (67, 65), 1, ("row", "tensor")),
        _case("strided", (17, 35), 19, out_dtype=single, layout="strided"),
        _case("sliced", (31, 64), 48, layout="sliced"),
        _case("transposed", (3, 17, 32), 16, _TENSOR, layout="transposed"),
        _case("large", (17, 96), 19, _TENSOR, single, values="large"),
        _case("constant", (16, 256), 16, _TENSOR, single, bias=False, values="constant"),
        _case("nan", (9, 3), 11, values="nan"),
        _case("tile", (64, 256), 64, out_dtype=half, bias=False),
    ]


def _bad(
    input: Any = (2, 16),
    weight: Any = (5, 16),
    input_scale: Any = (),
    weight_scale: Any = (),
    bias: Any = None,
    dtype: torch.dtype = FLOAT8,
    **options: Any,
) -> Callable[[], tuple[tuple[Any, ...], dict]]:
    def tensor(x: Any, dtype: torch.dtype) -> Any:
        return torch.zeros(x, dtype=dtype) if isinstance(x, tuple) else x

    def arguments() -> tuple[tuple[Any, ...], dict]:
        numbers = (tensor(x, torch.float32) for x in (input_scale, weight_scale, bias))
        return (tensor(input, dtype), tensor(weight, FLOAT8), *numbers), dict(options)

    return arguments


ERRORS = [
    ErrorCase("input-type", _bad([[1.0]]), TypeError, r"`input` must be a torch\.Tensor, got list"),
    ErrorCase("weight-type", _bad(weight=2.0), TypeError, r"`weight` must be a torch\.Tensor, got float"),
    ErrorCase("scale-type", _bad(input_scale=1.0), TypeError, r"`input_scale` must be a torch\.Tensor, got float"),
    ErrorCase("bias-type", _bad(bias=2.0), TypeError, r"`bias` must be a torch\.Tensor or None, got float"),
    ErrorCase(
        "bfloat16",
        _bad(dtype=torch.bfloat16),
        TypeError,
        r"`input` has dtype bfloat16; accepted are float8_e4m3fn",
    ),
    ErrorCase(
        "e5m2", _bad(weight=torch.zeros(5, 16).to(torch.float8_e5m2)), TypeError, r"`weight` has dtype float8_e5m2"
    ),
    ErrorCase(
        "scale-dtype",
        _bad(weight_scale=torch.ones(()).half()),
        TypeError,
        r"`weight_scale` has dtype float16; accepted are float32",
    ),
    ErrorCase(
        "bias-dtype",
        _bad(bias=torch.ones(5).double()),
        TypeError,
        r"`bias` has dtype float64; accepted are bfloat16, float16, float32",
    ),
    ErrorCase("out-type", _bad(out_dtype=32), TypeError, r"`out_dtype` must be a torch\.dtype or .*, got int"),
    ErrorCase(
        "out-dtype",
        _bad(out_dtype=FLOAT8),
        TypeError,
        r"`out_dtype` is float8_e4m3fn; accepted are bfloat16, float16, float32",
    ),
    ErrorCase("out-name", _bad(out_dtype="half"), TypeError, r"`out_dtype` is half; accepted are bfloat16, float16"),
    ErrorCase("input-0d", _bad(()), ValueError, r"`input` must have at least 1 dimension, got a 0-"),
    ErrorCase("weight-1d", _bad(weight=(16,)), ValueError, r"`weight` must have 2 dimensions \(N, K\), got .*\(16,\)"),
    ErrorCase(
        "inner",
        _bad((2, 3), (5, 4)),
        ValueError,
        r"last dimension of `input` must equal that of `weight`, got 3 and 4 in shapes \(2, 3\) and \(5, 4\)",
    ),
    ErrorCase(
        "input-scale",
        _bad(input_scale=(2,)),
        ValueError,
        r"`input_scale` must have the shape \(\), .* or \(2, 1\), one per row of `input`, got \(2,\)",
    ),
    ErrorCase(
        "weight-scale",
        _bad(weight_scale=(1, 5)),
        ValueError,
        r"`weight_scale` must have the shape \(\), .* or \(5, 1\), one per row of `weight`, got \(1, 5\)",
    ),
    ErrorCase("bias-shape", _bad(bias=(4,)), ValueError, r"`bias` must have the shape \(5,\) .*, got \(4,\)"),
    ErrorCase(
        "devices",
        _bad(weight_scale=torch.ones((), device="meta")),
        ValueError,
        r"`input` and `weight_scale` must be on the same device, got cpu and meta",
    ),
]

# (M, N, K) and the scales: squares, the products of a feed-forward layer, unaligned sizes, decoding.
_SWEEP = [
    ((4096, 4096, 4096), "row"),
    ((4096, 4096, 4096), "tensor"),
    ((16384, 4096, 4096), "row"),
    ((8192, 14336, 4096), "row"),
    ((8192, 4096, 14336), "row"),
    ((4095, 4097, 4099), "row"),
    ((16, 8192, 8192), "row"),
]


def sweep() -> list[Case]:
    return [
        _case(
            f"{m}x{n}x{k} {scales}",
            (m, k),
            n,
            (scales, scales),
            bias=False,
            passes=("forward",),
            quick=(m, n, k) == (4096, 4096, 4096) and scales == "row",
        )
        for (m, n, k), scales in _SWEEP
    ]
