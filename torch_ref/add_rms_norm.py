"""A transformer's residual sum and its RMSNorm, as one operation that returns both.

sum = input + residual, rounded to the dtype
add_rms_norm(input, residual) = rms_norm(sum), sum

The norm reads the rounded sum: the next block adds to it, and the backward pass reads it.
"""

import math

import torch

from kernel_ladder.semantics.norms import check_eps, computation_dtype, eps_or_default
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec
from torch_ref import rms_norm
from torch_ref.norm_samples import cases, sweep


def naive(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula, one kernel per operator."""
    total = input + residual
    x = total.to(computation_dtype(total.dtype))
    output = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps_or_default(eps, input.dtype))
    if weight is not None:
        output = output * weight
    return output.to(total.dtype), total


def builtin(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's sum, then its rms_norm: two calls."""
    total = input + residual
    return rms_norm.builtin(total, weight, normalized_shape=total.shape[-1:], eps=eps), total


def check(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *, eps: float | None) -> None:
    op = "add_rms_norm"
    given = {} if weight is None else {"weight": weight}
    check_tensors(op, optional=("weight",), parameters=("weight",), input=input, residual=residual, **given)
    if input.dim() == 0:
        raise ValueError(f"{op}: argument `input` must have at least one dimension, got a scalar")
    if residual.shape != input.shape:
        raise ValueError(
            f"{op}: argument `residual` must have the shape {tuple(input.shape)} of `input`, "
            f"got {tuple(residual.shape)}"
        )
    if weight is not None and weight.shape != input.shape[-1:]:
        raise ValueError(
            f"{op}: argument `weight` must have the shape {tuple(input.shape[-1:])} of a row, got {tuple(weight.shape)}"
        )
    check_eps(op, eps)


def _shapes(shape: tuple[int, ...], dims: int) -> tuple[tuple[int, ...], ...]:
    return shape, shape, shape[-dims:]


def _options(row: tuple[int, ...]) -> dict:
    return {"eps": None}


SAMPLES = [
    *cases(_shapes, _options),
    Case("float32-weight", _shapes((17, 264), 1), _options((264,)), kinds={2: "parameter"}),
    Case("no-weight", ((17, 129), (17, 129), None), {"eps": None}),
    Case("no-weight-long", ((3, 16400), (3, 16400), None), {"eps": None}),
    Case("eps", _shapes((17, 64), 1), {"eps": 0.5}),
    Case("eps-integer", _shapes((17, 64), 1), {"eps": 2**70}),
]


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


ERRORS = [
    ErrorCase(
        "not-a-tensor", lambda: (([1.0], _zeros(1)), {}), TypeError, r"`input` must be a torch\.Tensor, got list"
    ),
    ErrorCase(
        "integer", lambda: ((torch.arange(3), torch.arange(3)), {}), TypeError, r"`input` has dtype int64; accepted are"
    ),
    ErrorCase(
        "residual-dtype",
        lambda: ((_zeros(2), _zeros(2, dtype=torch.float16)), {}),
        TypeError,
        r"`input` and `residual` must have the same dtype, got float32 and float16",
    ),
    ErrorCase("scalar", lambda: ((_zeros(), _zeros()), {}), ValueError, r"`input` must have at least one dimension"),
    ErrorCase(
        "residual-shape",
        lambda: ((_zeros(2, 3), _zeros(3)), {}),
        ValueError,
        r"`residual` must have the shape \(2, 3\) of `input`, got \(3,\)",
    ),
    ErrorCase(
        "weight-length",
        lambda: ((_zeros(2, 3), _zeros(2, 3), _zeros(2)), {}),
        ValueError,
        r"`weight` must have the shape \(3,\) of a row, got \(2,\)",
    ),
    ErrorCase(
        "eps-type",
        lambda: ((_zeros(3), _zeros(3)), {"eps": True}),
        TypeError,
        r"`eps` must be a number or None, got bool",
    ),
]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads input, residual and weight and writes norm and sum. Backward reads the sum, two gradients and the
    # weight, and writes the gradient that input and residual share, and the weight's.
    numel, weight = math.prod(case.shapes[0]), 0 if case.shapes[2] is None else math.prod(case.shapes[2])
    return itemsize * (4 * numel + 2 * weight if backward else 4 * numel + weight)


def _flops(case: Case, backward: bool) -> int:
    # As rms_norm, plus one per pass for the sum.
    return math.prod(case.shapes[0]) * (9 if backward else 5)


SPEC = register_spec(
    Spec(
        name="add_rms_norm",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=sweep(_shapes, _options),
        bytes=_bytes,
        flops=_flops,
    )
)

register("add_rms_norm", "torch.naive", forward=lambda *inputs, **options: (naive(*inputs, **options), ()))
register("add_rms_norm", "torch.builtin", forward=lambda *inputs, **options: (builtin(*inputs, **options), ()))
