"""A linear layer with its activation, ``activation(input · weightᵀ + bias)``.

Fused into the product's epilogue, bias and GELU need no pass over memory of their own. The formula of GELU and its
source are in :mod:`torch_ref.gelu`.
"""

import math

import torch
import torch.nn.functional as F

from kernel_ladder.semantics.linear_shapes import ACTIVATIONS
from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import Case, ErrorCase, Restated, Spec, check_tensors
from kernel_ladder.table import register, register_spec
from torch_ref import gelu, matmul


def naive(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator: the product and the sum go to memory and come back."""
    wide = computation_dtype(input.dtype)
    return _activated(torch.matmul(input.to(wide), weight.mT.to(wide)), bias, activation).to(input.dtype)


def with_rounded_product(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """The formula over PyTorch's product in the operands' dtype: fast in 16 bits, and rounded to 16 bits."""
    return _activated(torch.matmul(input, weight.mT), bias, activation)


def builtin(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """PyTorch's own functions: a product that adds the bias, and a kernel for GELU."""
    output = F.linear(input, weight, bias)
    return output if activation is None else F.gelu(output, approximate=ACTIVATIONS[activation])


def running_sum(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """The formula over a product with one running sum per element. See :func:`torch_ref.matmul.running_sum`."""
    return _activated(matmul.running_sum(input, weight.mT), bias, activation)


def _activated(product: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """Bias and activation in float32 or wider, rounded to the product's dtype."""
    wide = product.to(computation_dtype(product.dtype))
    output = wide if bias is None else wide + bias.to(wide.dtype)
    output = output if activation is None else gelu.naive(output, approximate=ACTIVATIONS[activation])
    return output.to(product.dtype)


def check(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, activation: str | None
) -> Restated | None:
    if bias is None:
        check_tensors("linear", input=input, weight=weight)
    else:
        check_tensors("linear", optional=("bias",), input=input, weight=weight, bias=bias)
    if input.dim() == 0:
        raise ValueError("linear: argument `input` must have at least 1 dimension, got a 0-dimensional tensor")
    if weight.dim() != 2:
        if weight.dim() == 1 and (bias is None or bias.dim() == 0):
            return Restated((input, weight[None], None if bias is None else bias[None]), _without_last)
        raise ValueError(
            f"linear: argument `weight` must have 2 dimensions (N, K), or be a vector (K,) with a `bias` of no "
            f"dimension or None, got shape {tuple(weight.shape)}"
            + ("" if bias is None else f" and `bias` {tuple(bias.shape)}")
        )
    if input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: the last dimension of `input` must equal that of `weight`, got {input.shape[-1]} and "
            f"{weight.shape[1]} in shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear: argument `bias` must have the shape ({weight.shape[0]},) of the rows of `weight`, "
            f"got {tuple(bias.shape)}"
        )
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ValueError(f"linear: argument `activation` must be None, 'gelu' or 'gelu_tanh', got {activation!r}")
    return None


def _without_last(output: torch.Tensor) -> torch.Tensor:
    return output.squeeze(-1)


Shape = tuple[int, ...]


def _case(id: str, input: Shape, n: int, activation: str | None, *, bias: bool = True, **more: str) -> Case:
    shapes = (input, (n, input[-1]), (n,) if bias else None)
    return Case(id, shapes, {"activation": activation}, **more)


SAMPLES = [
    _case("vector", (7,), 5, "gelu"),
    _case("one", (1, 1), 1, "gelu"),
    _case("small", (3, 8), 5, "gelu_tanh"),
    _case("tanh", (9, 17), 11, "gelu_tanh"),
    _case("empty-m", (0, 5), 3, "gelu"),
    _case("empty-n", (4, 5), 0, "gelu"),
    _case("empty-k", (4, 0), 6, "gelu"),
    _case("empty-k-no-bias", (4, 0), 6, None, bias=False),
    _case("row", (1, 65), 67, "gelu"),
    _case("column", (67, 65), 1, "gelu"),
    _case("prime", (37, 53), 41, "gelu"),
    _case("prime-no-activation", (37, 53), 41, None),
    _case("prime-no-bias", (37, 53), 41, "gelu", bias=False),
    _case("prime-product-alone", (37, 53), 41, None, bias=False),
    _case("tile", (64, 64), 64, "gelu"),
    _case("tile+1", (65, 129), 33, "gelu_tanh"),
    _case("tile-1", (63, 31), 127, "gelu"),
    _case("aligned", (130, 72), 136, "gelu"),
    _case("many-rows", (331, 24), 40, "gelu"),
    _case("thin", (9, 104), 72, "gelu"),
    _case("long-k", (3, 1021), 5, "gelu"),
    _case("3d", (2, 19, 24), 23, "gelu"),
    _case("4d", (2, 3, 5, 16), 8, None),
    _case("transposed", (37, 53), 41, "gelu", layout="transposed"),
    _case("3d-transposed", (3, 17, 19), 23, "gelu", layout="transposed"),
    _case("strided", (17, 35), 19, "gelu", layout="strided"),
    _case("sliced", (31, 67), 33, "gelu", layout="sliced"),
    _case("expanded", (17, 35), 19, "gelu", layout="expanded"),
    _case("large", (17, 23), 19, None, values="large"),
    _case("large-gelu", (5, 1), 7, "gelu", values="large"),
    _case("nan", (9, 3), 11, "gelu", values="nan"),
    _case("inf", (9, 3), 11, None, values="inf"),
]


def _zeros(*shapes: tuple[int, ...], **options: object) -> tuple[tuple[torch.Tensor, ...], dict]:
    return tuple(torch.zeros(s) for s in shapes), options


ERRORS = [
    ErrorCase(
        "input-not-a-tensor",
        lambda: (([[1.0]], torch.zeros(1, 1)), {}),
        TypeError,
        r"`input` must be a torch\.Tensor, got list",
    ),
    ErrorCase(
        "weight-not-a-tensor", lambda: ((torch.zeros(1, 1), 2.0), {}), TypeError, r"`weight` must be a torch\.Tensor"
    ),
    ErrorCase(
        "bias-not-a-tensor",
        lambda: ((torch.zeros(1, 1), torch.zeros(1, 1), 2.0), {}),
        TypeError,
        r"`bias` must be a torch\.Tensor or None, got float",
    ),
    ErrorCase(
        "integer",
        lambda: ((torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)), {}),
        TypeError,
        r"`input` has dtype int32; accepted are float16",
    ),
    ErrorCase(
        "dtypes",
        lambda: ((torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2).half()), {}),
        TypeError,
        r"`input` and `bias` must have the same dtype, got float32 and float16",
    ),
    ErrorCase(
        "devices",
        lambda: ((torch.zeros(2, 2), torch.zeros(2, 2, device="meta")), {}),
        ValueError,
        r"`input` and `weight` must be on the same device, got cpu and meta",
    ),
    ErrorCase("input-0d", lambda: _zeros((), (2, 2)), ValueError, r"`input` must have at least 1 dimension, got a 0-"),
    ErrorCase(
        "weight-3d",
        lambda: _zeros((2, 2), (2, 2, 2)),
        ValueError,
        r"`weight` must have 2 dimensions .* or be a vector .* got shape \(2, 2, 2\)",
    ),
    ErrorCase(
        "weight-vector-bias",
        lambda: _zeros((2, 2), (2,), (2,)),
        ValueError,
        r"`weight` must .* be a vector \(K,\) with a `bias` of no dimension or None, got shape \(2,\) and `bias`",
    ),
    ErrorCase(
        "inner",
        lambda: _zeros((2, 3), (5, 4)),
        ValueError,
        r"last dimension of `input` must equal that of `weight`, got 3 and 4 in shapes \(2, 3\) and \(5, 4\)",
    ),
    ErrorCase(
        "bias-length",
        lambda: _zeros((2, 3), (5, 3), (3,)),
        ValueError,
        r"`bias` must have the shape \(5,\) of the rows of `weight`, got \(3,\)",
    ),
    ErrorCase(
        "bias-dimensions",
        lambda: _zeros((2, 3), (5, 3), (1, 5)),
        ValueError,
        r"`bias` must have the shape \(5,\) .*, got \(1, 5\)",
    ),
    ErrorCase(
        "activation",
        lambda: _zeros((2, 3), (5, 3), activation="relu"),
        ValueError,
        r"`activation` must be None, 'gelu' or 'gelu_tanh', got 'relu'",
    ),
    ErrorCase(
        "activation-list",
        lambda: _zeros((2, 3), (5, 3), activation=["gelu"]),
        ValueError,
        r"`activation` must be None, 'gelu' or 'gelu_tanh', got \['gelu'\]",
    ),
]

# (M, N, K): each activation, a square, both products of a feed-forward layer, unaligned sizes, decoding.
_SWEEP = [
    ((16384, 4096, 4096), "gelu"),
    ((16384, 4096, 4096), "gelu_tanh"),
    ((16384, 4096, 4096), None),
    ((4096, 4096, 4096), "gelu"),
    ((8192, 14336, 4096), "gelu"),
    ((8192, 4096, 14336), None),
    ((4095, 4097, 4099), "gelu"),
    ((16, 8192, 8192), "gelu"),
    ((1, 8192, 8192), "gelu"),
]
_QUICK = {((16384, 4096, 4096), "gelu"), ((4096, 4096, 4096), "gelu")}

SWEEP = [
    Case(
        f"{m}x{n}x{k} {activation or 'none'}",
        ((m, k), (n, k), (n,)),
        {"activation": activation},
        quick=((m, n, k), activation) in _QUICK,
    )
    for (m, n, k), activation in _SWEEP
]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads the operands and writes the output; saving for a gradient is not part of the least. Backward reads
    # gradient, input, weight and the saved pre-activation, and writes a gradient per argument.
    input, weight, bias = case.shapes
    output, n = math.prod(input[:-1]) * weight[0], weight[0] if bias else 0
    operands = math.prod(input) + math.prod(weight)
    if not backward:
        return itemsize * (operands + n + output)
    return itemsize * (2 * operands + n + output * (1 if case.options["activation"] is None else 2))


def _flops(case: Case, backward: bool) -> int:
    # The products', as matmul counts them, so that rates compare. Work done once per output is not counted.
    input, weight, _ = case.shapes
    return 2 * math.prod(input) * weight[0] * (2 if backward else 1)


SPEC = register_spec(
    Spec(
        name="linear",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=SWEEP,
        bytes=_bytes,
        flops=_flops,
        yardstick=running_sum,
    )
)

register("linear", "torch.naive", forward=lambda *inputs, **options: (naive(*inputs, **options), ()))
register("linear", "torch.builtin", forward=lambda *inputs, **options: (builtin(*inputs, **options), ()))
