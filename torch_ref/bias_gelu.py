"""Bias and GELU, ``gelu(input + bias)``, between the two matrix products of a transformer's feed-forward layer.

The formula of GELU and its source are in :mod:`torch_ref.gelu`.
"""

import math

import torch
import torch.nn.functional as F

from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec
from torch_ref import gelu


def naive(input: torch.Tensor, bias: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator: the sum goes to memory and comes back."""
    wide = computation_dtype(input.dtype)
    return gelu.naive(input.to(wide) + bias.to(wide), approximate=approximate).to(input.dtype)


def builtin(input: torch.Tensor, bias: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """PyTorch's own functions: two kernels, because PyTorch has no fused one. float16 has no room for every sum."""
    if input.dtype is torch.float16:
        return F.gelu(input.float() + bias, approximate=approximate).to(input.dtype)
    return F.gelu(input + bias, approximate=approximate)


def check(input: torch.Tensor, bias: torch.Tensor, *, approximate: str) -> None:
    check_tensors("bias_gelu", input=input, bias=bias)
    if input.dim() == 0:
        raise ValueError("bias_gelu: argument `input` must have at least one dimension, got a scalar")
    if bias.shape != input.shape[-1:]:
        raise ValueError(
            f"bias_gelu: argument `bias` must have the shape ({input.shape[-1]},) of the last dimension of `input`, "
            f"got {tuple(bias.shape)}"
        )
    if approximate not in gelu.APPROXIMATIONS:
        raise ValueError(f"bias_gelu: argument `approximate` must be 'none' or 'tanh', got {approximate!r}")


def _cases() -> list[Case]:
    cases = []
    for approximate in gelu.APPROXIMATIONS:

        def case(id: str, shape: tuple[int, ...], approximate: str = approximate, **more: str) -> Case:
            return Case(f"{approximate}-{id}", (shape, shape[-1:]), {"approximate": approximate}, **more)

        cases += [
            case("no-rows", (0, 5)),
            case("empty-rows", (3, 0)),
            case("vector", (7,)),
            case("one", (1, 1)),
            case("row", (1, 1000)),
            case("column", (129, 1)),
            case("prime", (37, 53)),
            case("many-rows", (2051, 24)),
            case("tile+1", (3, 1025)),
            case("tile-1", (2, 8184)),
            case("3d", (3, 5, 264)),
            case("halves", (9, 136), layout="halves"),
            case("transposed", (37, 64), layout="transposed"),
            case("4d", (2, 3, 5, 7), layout="transposed"),
            case("strided", (5, 129), layout="strided"),
            case("sliced", (7, 64), layout="sliced"),
            case("expanded", (9, 40), layout="expanded"),
            case("large", (31, 33), values="large"),
            case("nan", (3, 257), values="nan"),
            case("inf", (3, 257), values="inf"),
        ]
    return cases


def _bad(id: str, input: tuple[int, ...], bias: tuple[int, ...], message: str) -> ErrorCase:
    return ErrorCase(id, lambda: ((torch.zeros(input), torch.zeros(bias)), {}), ValueError, message)


ERRORS = [
    ErrorCase("not-a-tensor", lambda: ((1.0, torch.zeros(1)), {}), TypeError, r"`input` must be a torch\.Tensor"),
    ErrorCase("none", lambda: ((torch.zeros(1), None), {}), TypeError, r"`bias` must be a torch\.Tensor, got NoneType"),
    ErrorCase("integer", lambda: ((torch.arange(3),) * 2, {}), TypeError, r"`input` has dtype int64; accepted"),
    ErrorCase(
        "two-dtypes",
        lambda: ((torch.zeros(2), torch.zeros(2).half()), {}),
        TypeError,
        "`input` and `bias` must have the same dtype, got float32 and float16",
    ),
    _bad("scalar", (), (1,), "`input` must have at least one dimension, got a scalar"),
    _bad("length", (2, 3), (2,), r"`bias` must have the shape \(3,\) of the last dimension of `input`, got \(2,\)"),
    _bad("dimensions", (2, 3), (1, 3), r"`bias` must have the shape \(3,\) .*, got \(1, 3\)"),
    ErrorCase(
        "approximate",
        lambda: ((torch.zeros(2), torch.zeros(2)), {"approximate": "erf"}),
        ValueError,
        "`approximate` must be 'none' or 'tanh', got 'erf'",
    ),
]


def _sweep() -> list[Case]:
    shapes = [(65536, 256), (16384, 1024), (16384, 4096), (8192, 16384), (4096, 65536), (2048, 131072)]
    quick = {(16384, 1024), (16384, 4096)}
    return [
        Case(f"{m}x{n} {approximate}", ((m, n), (n,)), {"approximate": approximate}, quick=(m, n) in quick)
        for approximate in gelu.APPROXIMATIONS
        for m, n in shapes
    ]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads input and bias and writes the output. Backward reads both and the gradient, and writes two more.
    numel, length = (math.prod(shape) for shape in case.shapes)
    return itemsize * (3 * numel + 2 * length if backward else 2 * numel + length)


def _flops(case: Case, backward: bool) -> int:
    # GELU's, plus the sum. Backward: the sum again, plus the sum over rows.
    (numel, _) = (math.prod(shape) for shape in case.shapes)
    per_element = 5 if case.options["approximate"] == "none" else 9
    return numel * (2 * per_element + 2 if backward else per_element + 1)


SPEC = register_spec(
    Spec(
        name="bias_gelu",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=_cases(),
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
    )
)

register("bias_gelu", "torch.naive", forward=lambda input, bias, **options: (naive(input, bias, **options), ()))
register("bias_gelu", "torch.builtin", forward=lambda input, bias, **options: (builtin(input, bias, **options), ()))
