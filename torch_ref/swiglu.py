"""SwiGLU's gate, ``silu(gate) · up`` with ``silu(x) = x · sigmoid(x)``.

Source: Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202. Two matrix products make `gate` and `up`, and a
third one takes the result.
"""

import math

import torch
import torch.nn.functional as F

from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec


def naive(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator."""
    x, y = (t.to(computation_dtype(t.dtype)) for t in (gate, up))
    return (x * torch.sigmoid(x) * y).to(gate.dtype)


def builtin(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """PyTorch's own functions: two kernels, because PyTorch has no fused one. float16 has no room for every product."""
    if gate.dtype is torch.float16:
        return (F.silu(gate.float()) * up).to(gate.dtype)
    return F.silu(gate) * up


def check(gate: torch.Tensor, up: torch.Tensor) -> None:
    check_tensors("swiglu", gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(
            f"swiglu: arguments `gate` and `up` must have the same shape, got {tuple(gate.shape)} and {tuple(up.shape)}"
        )


def _case(id: str, shape: tuple[int, ...], **more: str) -> Case:
    return Case(id, (shape, shape), **more)


SAMPLES = [
    _case("empty", (0,)),
    _case("scalar", ()),
    _case("one", (1,)),
    _case("prime", (1009,)),
    _case("tile+1", (3, 1025)),
    _case("tile-1", (2, 8191)),
    _case("halves", (9, 136), layout="halves"),
    _case("halves-3d", (2, 5, 1032), layout="halves"),
    _case("halves-odd", (7, 67), layout="halves"),
    _case("column", (129, 1)),
    _case("transposed", (37, 53), layout="transposed"),
    _case("4d", (2, 3, 5, 7), layout="transposed"),
    _case("strided", (5, 129), layout="strided"),
    _case("sliced", (7, 67), layout="sliced"),
    _case("expanded", (9, 33), layout="expanded"),
    _case("large", (31, 33), values="large"),
    _case("nan", (257,), values="nan"),
    _case("inf", (257,), values="inf"),
]

ERRORS = [
    ErrorCase("not-a-tensor", lambda: (([1.0], torch.zeros(1)), {}), TypeError, r"`gate` must be a torch\.Tensor"),
    ErrorCase("none", lambda: ((torch.zeros(1), None), {}), TypeError, r"`up` must be a torch\.Tensor, got NoneType"),
    ErrorCase("integer", lambda: ((torch.arange(3),) * 2, {}), TypeError, r"`gate` has dtype int64; accepted"),
    ErrorCase(
        "two-dtypes",
        lambda: ((torch.zeros(2), torch.zeros(2).half()), {}),
        TypeError,
        "`gate` and `up` must have the same dtype, got float32 and float16",
    ),
    ErrorCase(
        "shapes",
        lambda: ((torch.zeros(2, 3), torch.zeros(3)), {}),
        ValueError,
        r"`gate` and `up` must have the same shape, got \(2, 3\) and \(3,\)",
    ),
]


def _sweep() -> list[Case]:
    shapes = [(65536, 256), (16384, 1024), (16384, 4096), (8192, 16384), (4096, 65536), (2048, 131072)]
    quick = {(16384, 1024), (16384, 4096)}
    return [Case(f"{m}x{n}", ((m, n), (m, n)), quick=(m, n) in quick) for m, n in shapes]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads two and writes one. Backward reads these two and the gradient, and writes two gradients.
    return math.prod(case.shapes[0]) * itemsize * (5 if backward else 3)


def _flops(case: Case, backward: bool) -> int:
    # Counts the exponential as one. Forward: sigmoid 4, two products. Backward: sigmoid again, its slope, products.
    return math.prod(case.shapes[0]) * (12 if backward else 6)


SPEC = register_spec(
    Spec(
        name="swiglu",
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

register("swiglu", "torch.naive", forward=lambda gate, up: (naive(gate, up), ()))
register("swiglu", "torch.builtin", forward=lambda gate, up: (builtin(gate, up), ()))
