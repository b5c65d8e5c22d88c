"""LayerNorm: rows shifted to mean zero and divided by their deviation (Ba, Kiros and Hinton, arXiv:1607.06450).

layer_norm(x)ᵢ = (xᵢ − mean x) / √(mean (x − mean x)² + eps) · weightᵢ + biasᵢ

The variance is the mean square of the centred row. The formula mean x² − (mean x)² cancels where the mean is large.
The 16-bit dtypes compute in float32 and round once, as PyTorch does.
"""

import math

import torch
import torch.nn.functional as F

from kernel_ladder.semantics.norms import check_normalized, computation_dtype, on_cpu_in_16_bits
from kernel_ladder.spec import Case, ErrorCase, Spec, converted, mixed
from kernel_ladder.table import register, register_spec
from kernel_ladder.tracing import wants_gradient
from torch_ref.norm_samples import cases, sweep


def naive(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float = 1e-5,
) -> torch.Tensor:
    """The formula, one kernel per operator."""
    dims = tuple(range(-len(normalized_shape), 0))
    x = input.to(computation_dtype(input.dtype))
    centred = x - x.mean(dims, keepdim=True)
    output = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + float(eps))
    if weight is not None:
        output = output * weight
    if bias is not None:
        output = output + bias
    return output.to(input.dtype)


def builtin(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float = 1e-5,
) -> torch.Tensor:
    """PyTorch's fused kernel. It runs in float32 where parameters are float32 beside 16 bits, which a GPU refuses.

    So do gradients of 16 bits on a CPU, where PyTorch adds up those of the parameters in 16 bits: 512 for 4096 ones.
    """
    if mixed(input, weight, bias) or (on_cpu_in_16_bits(input) and wants_gradient(input, weight, bias)):
        wide = converted((input, weight, bias), torch.float32)
        return F.layer_norm(wide[0], normalized_shape, wide[1], wide[2], float(eps)).to(input.dtype)
    return F.layer_norm(input, normalized_shape, weight, bias, float(eps))


def check(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    normalized_shape: tuple[int, ...],
    eps: float,
) -> None:
    check_normalized("layer_norm", input, normalized_shape, eps, False, weight=weight, bias=bias)


def _shapes(shape: tuple[int, ...], dims: int) -> tuple[tuple[int, ...], ...]:
    return shape, shape[-dims:], shape[-dims:]


def _options(row: tuple[int, ...]) -> dict:
    return {"normalized_shape": row, "eps": 1e-5}


SAMPLES = [
    *cases(_shapes, _options),
    Case("two-dims", _shapes((4, 3, 5, 8), 2), _options((5, 8))),
    Case("every-dim", _shapes((3, 7), 2), _options((3, 7))),
    Case("transposed-dims", _shapes((4, 37, 53), 2), _options((37, 53)), layout="transposed"),
    Case("float32-both", _shapes((17, 264), 1), _options((264,)), kinds={1: "parameter", 2: "parameter"}),
    Case("float32-bias-long", _shapes((3, 20000), 1), _options((20000,)), kinds={2: "parameter"}),
    Case("neither", ((17, 129), None, None), _options((129,))),
    Case("weight-only", ((17, 129), (129,), None), _options((129,))),
    Case("bias-only", ((17, 129), None, (129,)), _options((129,))),
    Case("neither-long", ((3, 16400), None, None), _options((16400,))),
    Case("eps", _shapes((17, 64), 1), {"normalized_shape": (64,), "eps": 0.5}),
    Case("eps-integer", _shapes((17, 64), 1), {"normalized_shape": (64,), "eps": 2**70}),
]


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


ERRORS = [
    ErrorCase("not-a-tensor", lambda: (([1.0], (1,)), {}), TypeError, r"`input` must be a torch\.Tensor, got list"),
    ErrorCase("integer", lambda: ((torch.arange(3), (3,)), {}), TypeError, r"`input` has dtype int64; accepted are"),
    ErrorCase(
        "bias-dtype",
        lambda: ((_zeros(2), (2,), None, _zeros(2, dtype=torch.float16)), {}),
        TypeError,
        r"`input` and `bias` must have the same dtype, got float32 and float16",
    ),
    ErrorCase(
        "weight-length",
        lambda: ((_zeros(2, 3), (3,), _zeros(4)), {}),
        ValueError,
        r"`weight` must have the shape \(3,\) of a row, got \(4,\)",
    ),
    ErrorCase(
        "bias-length",
        lambda: ((_zeros(2, 3), (3,), _zeros(3), _zeros(1, 3)), {}),
        ValueError,
        r"`bias` must have the shape \(3,\) of a row, got \(1, 3\)",
    ),
    ErrorCase(
        "shape-type", lambda: ((_zeros(2, 3), 3), {}), TypeError, r"`normalized_shape` must be a tuple or list of ints"
    ),
    ErrorCase(
        "shape",
        lambda: ((_zeros(2, 3), (2,)), {}),
        ValueError,
        r"`normalized_shape` must be the last dimensions of `input`, at least one: got \(2,\) for a shape of \(2, 3\)",
    ),
    ErrorCase("shape-empty", lambda: ((_zeros(2, 3), ()), {}), ValueError, r"at least one: got \(\) for"),
    ErrorCase(
        "eps-none", lambda: ((_zeros(3), (3,)), {"eps": None}), TypeError, r"`eps` must be a number, got NoneType"
    ),
    ErrorCase("eps-nan", lambda: ((_zeros(3), (3,)), {"eps": math.nan}), ValueError, r"`eps` must be finite, got nan"),
]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads input, weight and bias, and writes the output. Backward reads input, gradient and weight, and writes
    # the gradients of all three arguments.
    numel, row = math.prod(case.shapes[0]), math.prod(case.options["normalized_shape"])
    weight, bias = (row * (shape is not None) for shape in case.shapes[1:])
    return itemsize * (3 * numel + 2 * weight + bias if backward else 2 * numel + weight + bias)


def _flops(case: Case, backward: bool) -> int:
    # Forward: sum, difference, square, sum, two products, shift. Backward: the normalised value again (2), six for the
    # input's gradient, three for those of weight and bias.
    return math.prod(case.shapes[0]) * (11 if backward else 7)


SPEC = register_spec(
    Spec(
        name="layer_norm",
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

register("layer_norm", "torch.naive", forward=lambda *inputs, **options: (naive(*inputs, **options), ()))
register("layer_norm", "torch.builtin", forward=lambda *inputs, **options: (builtin(*inputs, **options), ()))
