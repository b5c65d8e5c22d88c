"""Sum over some or all dimensions, as torch.sum: in float32 or wider, then rounded once."""

import math
from typing import Any

import torch

from kernel_ladder.semantics.norms import computation_dtype, on_cpu_in_16_bits
from kernel_ladder.semantics.reduction import Dim, reduced_dims, sum_shape
from kernel_ladder.spec import Case, ErrorCase, Spec, check_tensors
from kernel_ladder.table import register, register_spec

#: Number of orders of addition that the yardstick chooses from.
ORDERS = 8


def naive(input: torch.Tensor, *, dim: Dim = None, keepdim: bool = False) -> torch.Tensor:
    """The formula, one kernel per operator: 16-bit inputs are first copied to float32 in memory, then summed."""
    return _wide(input).sum(dim, keepdim).to(input.dtype)


def builtin(input: torch.Tensor, *, dim: Dim = None, keepdim: bool = False) -> torch.Tensor:
    """PyTorch's own kernel, which converts while it reads. On a CPU it would keep partial sums of 16 bits."""
    wide = torch.float32 if on_cpu_in_16_bits(input) else None
    return torch.sum(input, dim, keepdim, dtype=wide).to(input.dtype)


def unluckiest(input: torch.Tensor, *, dim: Dim = None, keepdim: bool = False) -> torch.Tensor:
    """The sum in several orders; each output takes the order with the largest error.

    It sets the bound of the agreement check. With few outputs, the error of one order is a matter of luck. It may be
    zero, a bound that no other order meets.
    """
    x = _wide(input)
    dims = reduced_dims(dim, input.dim())
    sums = [x.sum(dim, keepdim)]
    longest = max(dims, key=lambda d: input.shape[d], default=None)
    for seed in range(1, ORDERS if longest is not None else 1):
        order = torch.randperm(input.shape[longest], generator=torch.Generator().manual_seed(seed))
        sums.append(x.index_select(longest, order.to(input.device)).sum(dim, keepdim))
    found = torch.stack(sums)
    errors = (found.detach().double() - input.detach().double().sum(dim, keepdim)).abs()
    return found.gather(0, errors.argmax(0, keepdim=True)).squeeze(0).to(input.dtype)


def _wide(input: torch.Tensor) -> torch.Tensor:
    return input.to(computation_dtype(input.dtype))


def check(input: torch.Tensor, *, dim: object, keepdim: object) -> None:
    check_tensors("sum", input=input)
    if not isinstance(keepdim, bool):
        raise TypeError(f"sum: argument `keepdim` must be a bool, got {type(keepdim).__name__}")
    if dim is None:
        return
    dims = max(input.dim(), 1)
    given = dim if isinstance(dim, tuple) else (dim,)
    for d in given:
        if isinstance(d, bool) or not isinstance(d, int):
            inside = "a tuple with " if isinstance(dim, tuple) else ""
            raise TypeError(
                f"sum: argument `dim` must be an int, a tuple or list of ints, or None, got {inside}{type(d).__name__}"
            )
        if not -dims <= d < dims:
            raise IndexError(
                f"sum: argument `dim` must be from {-dims} to {dims - 1} for {input.dim()} dimensions, got {d}"
            )
    if len(given) > 1 and len({d % dims for d in given}) < len(given):
        raise ValueError(f"sum: argument `dim` must name each dimension once, got {given}")


def _case(id: str, shape: tuple[int, ...], dim: Dim = -1, keepdim: bool = False, **more: Any) -> Case:
    return Case(id, (shape,), {"dim": dim, "keepdim": keepdim}, **more)


SAMPLES = [
    # Empty inputs, and inputs of one element.
    _case("scalar", (), None),
    _case("scalar-dim", (), -1),
    _case("one", (1,)),
    _case("empty", (0,), None),
    _case("empty-row", (3, 0)),
    _case("empty-column", (0, 3), 0),
    _case("no-rows", (0, 3)),
    _case("single-column", (7, 1)),
    _case("single-row", (1, 70), 0),
    # The summed dimension is contiguous.
    _case("short", (70, 5)),
    _case("vector-multiple", (33, 256)),
    _case("prime", (3, 1009)),
    _case("tile-1", (5, 1023)),
    _case("tile+1", (5, 1025)),
    _case("tile+1-keepdim", (5, 4097), -1, True),
    _case("long", (2, 49999)),
    _case("million", (1, 1_000_000)),
    # A kept dimension is contiguous.
    _case("short-columns", (5, 70), 0),
    _case("columns-vector-multiple", (131, 264), 0),
    _case("prime-columns", (1009, 3), 0),
    _case("tile+1-columns", (1025, 65), 0, True),
    _case("long-columns", (65537, 3), 0),
    _case("million-columns", (125_000, 8), 0),
    # Several dimensions, or all of them.
    _case("all", (37, 53), None),
    _case("all-keepdim", (37, 53), None, True),
    _case("no-dim", (4, 5, 6), ()),
    _case("million-all", (1009, 997), None),
    _case("middle", (5, 17, 9), 1),
    _case("middle-vector-multiple", (5, 17, 24), -2),
    _case("outer", (7, 5, 24), (0, 1)),
    _case("outer-and-inner", (7, 5, 24), (0, 2)),
    _case("outer-and-inner-odd", (7, 5, 13), (-1, 0), True),
    _case("first-and-third", (3, 5, 7, 16), (2, 0)),
    _case("5d", (2, 3, 4, 3, 5), (1, 3)),
    # Memory.
    _case("transposed", (37, 53), layout="transposed"),
    _case("transposed-columns", (37, 53), 0, layout="transposed"),
    _case("transposed-all", (37, 53), None, layout="transposed"),
    _case("transposed-middle", (4, 37, 53), 1, layout="transposed"),
    _case("bshd", (2, 3, 17, 8), (0, 2), layout="bshd"),
    _case("strided", (6, 129), layout="strided"),
    _case("strided-columns", (129, 6), 0, layout="strided"),
    _case("strided-all", (129, 257), None, layout="strided"),
    _case("sliced", (6, 1100), layout="sliced"),
    _case("sliced-columns", (67, 264), 0, layout="sliced"),
    _case("expanded", (9, 33), layout="expanded"),
    _case("expanded-columns", (9, 33), 0, layout="expanded"),
    _case("expanded-all", (9, 33), None, layout="expanded"),
    # Values.
    _case("large", (31, 130), values="large"),
    _case("large-columns", (130, 31), 0, values="large"),
    _case("constant", (3, 4096), values="constant"),
    _case("neg-inf-rows", (6, 200), values="neg_inf_rows"),
    _case("nan", (50, 9), values="nan"),
    _case("nan-columns", (5, 50), 0, values="nan"),
    _case("inf", (50, 9), values="inf"),
    _case("inf-columns", (5, 50), 0, values="inf"),
]


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


ERRORS = [
    ErrorCase("not-a-tensor", lambda: (([1.0],), {}), TypeError, r"`input` must be a torch\.Tensor, got list"),
    ErrorCase("integer", lambda: ((torch.arange(3),), {}), TypeError, r"`input` has dtype int64; accepted are float16"),
    ErrorCase("bool", lambda: ((torch.ones(2, dtype=torch.bool),), {}), TypeError, r"`input` has dtype bool"),
    ErrorCase("dim-type", lambda: ((_zeros(2), 0.0), {}), TypeError, r"`dim` must be an int, a tuple .* got float"),
    ErrorCase("dim-bool", lambda: ((_zeros(2), True), {}), TypeError, r"`dim` must be an int, a tuple .* got bool"),
    ErrorCase("dim-name", lambda: ((_zeros(2), ("x",)), {}), TypeError, r"`dim` must be .* got a tuple with str"),
    ErrorCase("dim-high", lambda: ((_zeros(2, 3), 2), {}), IndexError, r"`dim` must be from -2 to 1 .* got 2"),
    ErrorCase("dim-low", lambda: ((_zeros(2, 3), (0, -3)), {}), IndexError, r"`dim` must be from -2 to 1 .* got -3"),
    ErrorCase("dim-scalar", lambda: ((_zeros(), 1), {}), IndexError, r"`dim` must be from -1 to 0 for 0 dim.* got 1"),
    ErrorCase("twice", lambda: ((_zeros(2, 3), (1, -1)), {}), ValueError, r"name each dimension once, got \(1, -1\)"),
    ErrorCase("keepdim", lambda: ((_zeros(2, 3), 0, 1), {}), TypeError, r"`keepdim` must be a bool, got int"),
]


def _sweep() -> list[Case]:
    shapes = [(65536, 256), (16384, 1024), (16384, 4096), (8192, 16384), (4096, 65536), (2048, 131072)]
    quick = {(16384, 1024), (16384, 4096)}
    kinds: dict[str, Dim] = {"all": None, "dim=0": 0, "dim=-1": -1}
    return [
        _case(f"{m}x{n} {kind}", (m, n), dim, quick=(m, n) in quick) for kind, dim in kinds.items() for m, n in shapes
    ]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Forward reads the input and writes the sums. The gradient is a view of the sums' gradient, so backward moves none.
    (shape,) = case.shapes
    outputs = math.prod(sum_shape(shape, reduced_dims(case.options["dim"], len(shape)), False))
    return 0 if backward else (math.prod(shape) + outputs) * itemsize


def _flops(case: Case, backward: bool) -> int:
    return 0 if backward else math.prod(case.shapes[0])


SPEC = register_spec(
    Spec(
        name="sum",
        reference=naive,
        builtin=builtin,
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
        yardstick=unluckiest,
    )
)

register("sum", "torch.naive", forward=lambda input, **options: (naive(input, **options), ()))
register("sum", "torch.builtin", forward=lambda input, **options: (builtin(input, **options), ()))
