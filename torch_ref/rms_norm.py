"""RMSNorm: rows divided by their root mean square (Zhang and Sennrich, arXiv:1910.07467).

rms_norm(x)ᵢ = xᵢ / √(mean x² + eps) · weightᵢ

The 16-bit dtypes compute in float32 and round once, as PyTorch does.
"""

import math

import torch
import torch.nn.functional as F

from kernel_ladder.semantics.norms import check_normalized, computation_dtype, eps_or_default
from kernel_ladder.spec import Case, ErrorCase, Spec, mixed
from kernel_ladder.table import register, register_spec
from torch_ref.norm_samples import cases, sweep


def naive(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float | None = None,
) -> torch.Tensor:
    """The formula, one kernel per operator."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.to(computation_dtype(input.dtype))
    output = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps_or_default(eps, input.dtype))
    if weight is not None:
        output = output * weight
    return output.to(input.dtype)


def builtin(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float | None = None,
) -> torch.Tensor:
    """PyTorch's own function; of a float32 weight beside 16 bits, which it gives to no fused kernel, in float32."""
    eps = None if eps is None else float(eps)
    if mixed(input, weight):
        return F.rms_norm(input.float(), normalized_shape, weight, eps).to(input.dtype)
    return F.rms_norm(input, normalized_shape, weight, eps)


def check(
    input: torch.Tensor, weight: torch.Tensor | None, *, normalized_shape: tuple[int, ...], eps: float | None
) -> None:
    check_normalized("rms_norm", input, normalized_shape, eps, weight=weight)


def _shapes(shape: tuple[int, ...], dims: int) -> tuple[tuple[int, ...], ...]:
    return shape, shape[-dims:]


def _options(row: tuple[int, ...]) -> dict:
    return {"normalized_shape": row, "eps": None}


SAMPLES = [
    *cases(_shapes, _options),
    Case("two-dims", _shapes((4, 3, 5, 8), 2), _options((5, 8))),
    Case("every-dim", _shapes((3, 7), 2), _options((3, 7))),
    Case("transposed-dims", _shapes((4, 37, 53), 2), _options((37, 53)), layout="transposed"),
    Case("float32-weight", _shapes((17, 264), 1), _options((264,)), kinds={1: "parameter"}),
    Case("no-weight", ((17, 129), None), _options((129,))),
    Case("no-weight-long", ((3, 16400), None), _options((16400,))),
    Case("eps", _shapes((17, 64), 1), {"normalized_shape": (64,), "eps": 0.5}),
    Case("eps-integer", _shapes((17, 64), 1), {"normalized_shape": (64,), "eps": 2**70}),
]


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


ERRORS = [
    ErrorCase("not-a-tensor", lambda: (([1.0], (1,)), {}), TypeError, r"`input` must be a torch\.Tensor, got list"),
    ErrorCase("integer", lambda: ((torch.arange(3), (3,)), {}), TypeError, r"`input` has dtype int64; accepted are"),
    ErrorCase(
        "weight-type",
        lambda: ((_zeros(2), (2,), 1.0), {}),
        TypeError,
        r"`weight` must be a torch\.Tensor or None, got float",
    ),
    ErrorCase(
        "weight-dtype",
        lambda: ((_zeros(2), (2,), _zeros(2, dtype=torch.float16)), {}),
        TypeError,
        r"`input` and `weight` must have the same dtype, got float32 and float16",
    ),
    ErrorCase(
        "weight-length",
        lambda: ((_zeros(2, 3), (3,), _zeros(4)), {}),
        ValueError,
        r"`weight` must have the shape \(3,\) of a row, got \(4,\)",
    ),
    ErrorCase(
        "shape-type", lambda: ((_zeros(2, 3), 3), {}), TypeError, r"`normalized_shape` must be a tuple or list of ints"
    ),
    ErrorCase(
        "shape-of-floats",
        lambda: ((_zeros(2, 3), (3.0,)), {}),
        TypeError,
        r"must be a tuple or list of ints, got \(3.0,\)",
    ),
    ErrorCase(
        "shape",
        lambda: ((_zeros(2, 3), (2,)), {}),
        ValueError,
        r"`normalized_shape` must be the last dimensions of `input`, at least one: got \(2,\) for a shape of \(2, 3\)",
    ),
    ErrorCase("shape-empty", lambda: ((_zeros(2, 3), ()), {}), ValueError, r"at least one: got \(\) for"),
    ErrorCase("shape-long", lambda: ((_zeros(3), (2, 3)), {}), ValueError, r"got \(2, 3\) for a shape of \(3,\)"),
    ErrorCase(
        "eps-type", lambda: ((_zeros(3), (3,)), {"eps": "small"}), TypeError, r"`eps` must be a number or None, got str"
    ),
    ErrorCase(
        "eps-beyond", lambda: ((_zeros(3), (3,)), {"eps": 10**309}), ValueError, r"`eps` must be finite, got 1000"
    ),
    ErrorCase(
        "eps-infinite", lambda: ((_zeros(3), (3,)), {"eps": -math.inf}), ValueError, r"`eps` must be finite, got -inf"
    ),
]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads input and weight and writes the output. Backward reads both and the gradient, and writes two more.
    numel, weight = math.prod(case.shapes[0]), 0 if case.shapes[1] is None else math.prod(case.shapes[1])
    return itemsize * (3 * numel + 2 * weight if backward else 2 * numel + weight)


def _flops(case: Case, backward: bool) -> int:
    # Forward: square, sum, two products. Backward: the normalised value again, four for the input, two for the weight.
    return math.prod(case.shapes[0]) * (8 if backward else 4)


SPEC = register_spec(
    Spec(
        name="rms_norm",
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

register("rms_norm", "torch.naive", forward=lambda *inputs, **options: (naive(*inputs, **options), ()))
register("rms_norm", "torch.builtin", forward=lambda *inputs, **options: (builtin(*inputs, **options), ()))
