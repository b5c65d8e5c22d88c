"""Softmax along one dimension, shifted by its maximum so that no exponential overflows.

softmax(x)ᵢ = exp(xᵢ − max x) / Σⱼ exp(xⱼ − max x)
"""

import math

import torch

from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec


def naive(input: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator: five passes over memory where two would do."""
    if input.numel() == 0:
        return input * 1  # an empty row has no maximum
    x = input.to(computation_dtype(input.dtype))
    exponentials = torch.exp(x - x.amax(dim, keepdim=True))
    return (exponentials / exponentials.sum(dim, keepdim=True)).to(input.dtype)


def builtin(input: torch.Tensor, *, dim: int = -1) -> torch.Tensor:
    """PyTorch's fused kernel."""
    return torch.softmax(input, dim)


def check(input: torch.Tensor, *, dim: int) -> None:
    check_tensors("softmax", input=input)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"softmax: argument `dim` must be an int, got {type(dim).__name__}")
    dims = max(input.dim(), 1)
    if not -dims <= dim < dims:
        raise IndexError(
            f"softmax: argument `dim` must be from {-dims} to {dims - 1} for {input.dim()} dimensions, got {dim}"
        )


def _case(id: str, shape: tuple[int, ...], dim: int = -1, **more: str) -> Case:
    return Case(id, (shape,), {"dim": dim}, **more)


SAMPLES = [
    _case("scalar", ()),
    _case("one", (1,)),
    _case("empty-row", (3, 0)),
    _case("no-rows", (0, 3)),
    _case("column", (7, 1)),
    _case("short", (70, 5)),
    _case("prime", (3, 1009)),
    _case("tile-1", (5, 1023)),
    _case("tile+1", (5, 1025)),
    _case("vector-multiple", (33, 256)),
    _case("dim0", (67, 33), 0),
    _case("middle", (5, 17, 9), 1),
    _case("middle-negative", (5, 17, 9), -2),
    _case("4d", (2, 3, 5, 64), 3),
    _case("transposed", (37, 53), layout="transposed"),
    _case("transposed-middle", (4, 37, 53), 1, layout="transposed"),
    _case("strided", (6, 129), layout="strided"),
    _case("sliced", (6, 264), layout="sliced"),
    _case("expanded", (9, 33), layout="expanded"),
    _case("expanded-dim0", (9, 33), 0, layout="expanded"),
    _case("large", (31, 130), values="large"),
    _case("constant", (3, 4096), values="constant"),
    _case("falling", (5, 1200), values="falling"),
    _case("neg-inf-rows", (6, 200), values="neg_inf_rows"),
    _case("neg-inf-long-rows", (3, 40000), values="neg_inf_rows"),
    _case("lowest-rows", (6, 200), values="lowest_rows"),
    _case("lowest-long-rows", (3, 40000), values="lowest_rows"),
    _case("nan", (9, 50), values="nan"),
    _case("inf", (9, 50), values="inf"),
    _case("medium", (3, 20000)),
    _case("long", (2, 65537)),
    _case("million", (1, 1_000_000)),
]

ERRORS = [
    ErrorCase("not-a-tensor", lambda: ((1.0,), {}), TypeError, r"`input` must be a torch\.Tensor, got float"),
    ErrorCase("integer", lambda: ((torch.arange(3),), {}), TypeError, r"`input` has dtype int64; accepted are float16"),
    ErrorCase(
        "complex", lambda: ((torch.zeros(2, dtype=torch.complex64),), {}), TypeError, r"`input` has dtype complex64"
    ),
    ErrorCase("dim-type", lambda: ((torch.zeros(2),), {"dim": 0.0}), TypeError, r"`dim` must be an int, got float"),
    ErrorCase("dim-none", lambda: ((torch.zeros(2),), {"dim": None}), TypeError, r"`dim` must be an int, got NoneType"),
    ErrorCase("dim-high", lambda: ((torch.zeros(2, 3), 2), {}), IndexError, r"`dim` must be from -2 to 1 .* got 2"),
    ErrorCase("dim-low", lambda: ((torch.zeros(2, 3), -3), {}), IndexError, r"`dim` must be from -2 to 1 .* got -3"),
]


def _sweep() -> list[Case]:
    shapes = [
        (65536, 256),
        (16384, 1024),
        (16384, 4096),
        (8192, 16384),
        (4096, 65536),
        (2048, 131072),
        (256, 1_000_000),
    ]
    quick = {(16384, 1024), (16384, 4096)}
    return [Case(f"{m}x{n}", ((m, n),), {"dim": -1}, quick=(m, n) in quick) for m, n in shapes]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads the input and writes the output. Backward reads output and gradient and writes the gradient.
    return math.prod(case.shapes[0]) * itemsize * (3 if backward else 2)


def _flops(case: Case, backward: bool) -> int:
    # Counts the exponential as one. Forward: maximum, shift, exponential, sum, division. Backward: 2 + 2.
    return math.prod(case.shapes[0]) * (4 if backward else 5)


SPEC = register_spec(
    Spec(
        name="softmax",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
    )
)

register("softmax", "torch.naive", forward=lambda input, **options: (naive(input, **options), ()))
register("softmax", "torch.builtin", forward=lambda input, **options: (builtin(input, **options), ()))
