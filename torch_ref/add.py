"""Elementwise addition of two tensors that broadcast, as torch.add."""

import math

import torch

from kernel_ladder.semantics.reduction import broadcast_dims
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec


def naive(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The formula: one operator, so one kernel."""
    return input + other


def builtin(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """PyTorch's kernel."""
    return torch.add(input, other)


def check(input: torch.Tensor, other: torch.Tensor) -> None:
    check_tensors("add", input=input, other=other)
    a, b = input.shape, other.shape
    if a == b:
        return
    for size_a, size_b in zip(reversed(a), reversed(b), strict=False):
        if size_a != size_b and size_a != 1 and size_b != 1:
            raise ValueError(
                "add: the dimensions of `input` and `other`, counted from the last, must be equal or 1, "
                f"got shapes {tuple(a)} and {tuple(b)}"
            )


def _case(id: str, input: tuple[int, ...], other: tuple[int, ...] | None = None, **more: str) -> Case:
    return Case(id, (input, input if other is None else other), **more)


SAMPLES = [
    _case("scalars", ()),
    _case("one", (1,)),
    _case("empty", (0,)),
    _case("prime", (1009,)),
    _case("tile-1", (2, 8191)),
    _case("tile+1", (3, 1025)),
    _case("matrix", (129, 257)),
    # Broadcast: a row (a bias), a column, both, one value; the larger operand second; missing dimensions.
    _case("row", (67, 264), (264,)),
    _case("row-odd", (37, 53), (53,)),
    _case("row-tile+1", (5, 1025), (1, 1025)),
    _case("row-tile", (19, 1024), (1024,)),
    _case("rows", (4, 5, 64), (5, 64)),
    _case("row-first", (264,), (67, 264)),
    _case("column", (33, 72), (33, 1)),
    _case("column-first", (33, 1), (33, 37)),
    _case("outer", (33, 1), (1, 40)),
    _case("middle", (5, 7, 24), (7, 1)),
    _case("ends", (5, 7, 24), (5, 1, 24)),
    _case("scalar", (37, 53), ()),
    _case("scalar-first", (1,), (5, 64)),
    _case("both-4d", (2, 1, 5, 1), (3, 1, 8)),
    _case("empty-row", (0, 3), (3,)),
    _case("empty-columns", (3, 0), (3, 1)),
    _case("empty-stretched", (1, 3), (0, 3)),
    # Memory.
    _case("transposed", (37, 53), layout="transposed"),
    _case("transposed-row", (37, 53), (53,), layout="transposed"),
    _case("strided", (5, 129), layout="strided"),
    _case("strided-row", (5, 128), (128,), layout="strided"),
    _case("sliced", (7, 67), layout="sliced"),
    _case("sliced-row", (7, 64), (1, 64), layout="sliced"),
    _case("expanded", (9, 33), layout="expanded"),
    _case("4d", (2, 3, 5, 7), layout="transposed"),
    # Values.
    _case("large", (31, 33), values="large"),
    _case("nan", (9, 33), values="nan"),
    _case("nan-row", (9, 33), (33,), values="nan"),
    _case("inf", (9, 33), (33,), values="inf"),
]


def _zeros(*shapes: tuple[int, ...]) -> tuple[tuple[torch.Tensor, ...], dict]:
    return tuple(torch.zeros(s) for s in shapes), {}


ERRORS = [
    ErrorCase("input-type", lambda: ((1.0, torch.zeros(2)), {}), TypeError, r"`input` must be a torch\.Tensor, got fl"),
    ErrorCase("other-type", lambda: ((torch.zeros(2), 1), {}), TypeError, r"`other` must be a torch\.Tensor, got int"),
    ErrorCase(
        "integer", lambda: ((torch.arange(3),) * 2, {}), TypeError, r"`input` has dtype int64; accepted are float16"
    ),
    ErrorCase(
        "dtypes",
        lambda: ((torch.zeros(2), torch.zeros(2).half()), {}),
        TypeError,
        r"`input` and `other` must have the same dtype, got float32 and float16",
    ),
    ErrorCase(
        "devices",
        lambda: ((torch.zeros(2), torch.zeros(2, device="meta")), {}),
        ValueError,
        r"`input` and `other` must be on the same device, got cpu and meta",
    ),
    ErrorCase("sizes", lambda: _zeros((2, 3), (2,)), ValueError, r"must be equal or 1, got shapes \(2, 3\) and \(2,\)"),
    ErrorCase("outer", lambda: _zeros((4, 2, 3), (5, 1, 3)), ValueError, r"got shapes \(4, 2, 3\) and \(5, 1, 3\)"),
]


def _sweep() -> list[Case]:
    shapes = [(65536, 256), (16384, 1024), (16384, 4096), (8192, 16384), (4096, 65536), (2048, 131072)]
    quick = {(16384, 1024), (16384, 4096)}
    # With a row, backward sums the gradient over its rows. With equal shapes backward does no work.
    rows = [Case(f"{m}x{n} row", ((m, n), (n,)), quick=(m, n) in quick) for m, n in shapes]
    return rows + [Case(f"{m}x{n}", ((m, n), (m, n)), quick=(m, n) in quick) for m, n in shapes]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads both and writes the sum. Backward passes the gradient through to an operand of the output's shape
    # and moves nothing. For an operand that was broadcast it reads the gradient once and writes a sum.
    shape = torch.broadcast_shapes(*case.shapes)
    if not backward:
        return (sum(map(math.prod, case.shapes)) + math.prod(shape)) * itemsize
    summed = [math.prod(s) for s in case.shapes if broadcast_dims(s, shape)]
    return (math.prod(shape) + sum(summed)) * itemsize if summed else 0


def _flops(case: Case, backward: bool) -> int:
    shape = torch.broadcast_shapes(*case.shapes)
    return math.prod(shape) * (sum(bool(broadcast_dims(s, shape)) for s in case.shapes) if backward else 1)


SPEC = register_spec(
    Spec(
        name="add",
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

register("add", "torch.naive", forward=lambda input, other: (naive(input, other), ()))
register("add", "torch.builtin", forward=lambda input, other: (builtin(input, other), ()))
