"""Rotary position embedding: pairs of a row's elements are rotated by angles that grow with the row's position.

(y₁, y₂) = (x₁ · cos − x₂ · sin, x₂ · cos + x₁ · sin), or y = x · e^(iθ) for a pair as a complex number

Source: Su et al., RoFormer, arXiv:2104.09864. Interleaved pairs are neighbours, as in that paper. Otherwise a pair is
element i and element i + R / 2, as in GPT-NeoX and Llama. The angles of each position are a table of e^(iθ).
"""

import math

import torch

from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.semantics.rotary import check_offset
from kernel_ladder.spec import DTYPES, Case, ErrorCase, Spec, check_tensors, dtype_name
from kernel_ladder.table import register, register_spec


def naive(input: torch.Tensor, freqs_cis: torch.Tensor, *, interleaved: bool = False, offset: int = 0) -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator."""
    rotated, wide = 2 * freqs_cis.shape[1], computation_dtype(input.dtype)
    table = torch.view_as_real(freqs_cis.resolve_conj()[offset : offset + input.shape[-2]]).to(wide)
    cos, sin = table[..., 0], table[..., 1]
    x = input[..., :rotated].to(wide)
    if interleaved:
        x1, x2 = x[..., 0::2], x[..., 1::2]
        y = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2)
    else:
        x1, x2 = x.chunk(2, dim=-1)
        y = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    return torch.cat([y.to(input.dtype), input[..., rotated:]], dim=-1)


def check(input: torch.Tensor, freqs_cis: torch.Tensor, *, interleaved: bool, offset: int) -> None:
    op = "rope"
    check_tensors(op, DTYPES, input=input)
    if not isinstance(freqs_cis, torch.Tensor):
        raise TypeError(f"{op}: argument `freqs_cis` must be a torch.Tensor, got {type(freqs_cis).__name__}")
    if freqs_cis.dtype != torch.complex64:
        raise TypeError(f"{op}: argument `freqs_cis` has dtype {dtype_name(freqs_cis.dtype)}; accepted is complex64")
    if freqs_cis.device != input.device:
        raise ValueError(
            f"{op}: arguments `input` and `freqs_cis` must be on the same device, "
            f"got {input.device} and {freqs_cis.device}"
        )
    if freqs_cis.requires_grad:
        raise ValueError(f"{op}: argument `freqs_cis` must not require a gradient: it gets none")
    if type(interleaved) is not bool:
        raise TypeError(f"{op}: argument `interleaved` must be a bool, got {type(interleaved).__name__}")
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"{op}: argument `offset` must be an int, got {type(offset).__name__}")
    if input.dim() < 2 or freqs_cis.dim() != 2:
        raise ValueError(
            f"{op}: argument `input` must have at least two dimensions and `freqs_cis` two, "
            f"got {input.dim()} and {freqs_cis.dim()}"
        )
    positions, pairs = freqs_cis.shape
    if 2 * pairs > input.shape[-1]:
        raise ValueError(
            f"{op}: argument `freqs_cis` must rotate at most the {input.shape[-1]} elements of a row, got {pairs} pairs"
        )
    check_offset(offset, input.shape[-2], positions)


def _case(
    id: str,
    shape: tuple[int, ...],
    pairs: int | None = None,
    interleaved: bool = False,
    offset: int = 0,
    layout: str = "contiguous",
    values: str = "normal",
    **more: bool,
) -> Case:
    table = (shape[-2] + offset, shape[-1] // 2 if pairs is None else pairs)
    options = {"interleaved": interleaved, "offset": offset}
    return Case(id, (shape, table), options, layout=layout, values=values, kinds={1: "rotations"}, **more)


SAMPLES = [
    _case("one-pair", (1, 2)),
    _case("no-positions", (2, 0, 8)),
    _case("nothing-rotated", (3, 5), 0),
    _case("interleaved", (2, 3, 9, 64), interleaved=True),
    _case("offset", (2, 5, 32), offset=11),
    _case("partial", (2, 3, 5, 80), 16),
    _case("partial-interleaved", (2, 5, 80), 16, True),
    _case("odd-width", (3, 7, 37), 8),
    _case("odd-halves", (3, 7, 42)),
    _case("256", (2, 33, 256)),
    _case("bshd", (2, 3, 17, 64), layout="bshd"),
    _case("transposed", (5, 37, 26), layout="transposed"),
    _case("sliced", (6, 30), layout="sliced"),
    _case("expanded", (9, 4, 32), layout="expanded"),
    _case("five-dims", (2, 3, 2, 5, 16)),
    _case("large", (31, 34), values="large"),
    _case("nan", (9, 50), 16, values="nan"),
    _case("inf", (9, 50), 16, values="inf"),
]


def _table(positions: int, pairs: int) -> torch.Tensor:
    return torch.ones(positions, pairs, dtype=torch.complex64)


_bad = ErrorCase.of
ERRORS = [
    _bad("not-a-tensor", TypeError, r"`input` must be a torch\.Tensor, got list", [1.0], _table(1, 1)),
    _bad("integer", TypeError, "`input` has dtype int64; accepted are", torch.ones(3, 4).long(), _table(3, 2)),
    _bad("no-table", TypeError, r"`freqs_cis` must be a torch\.Tensor, got NoneType", torch.ones(3, 4), None),
    _bad("real-table", TypeError, "`freqs_cis` has dtype float32; accepted is complex64", *(torch.ones(3, 4),) * 2),
    _bad("gradient", ValueError, "must not require", torch.ones(3, 4), _table(3, 2).requires_grad_()),
    _bad("vector", ValueError, "`input` must have at least two dimensions", torch.ones(4), _table(3, 2)),
    _bad("table-dims", ValueError, "`freqs_cis` two, got 2 and 3", torch.ones(3, 4), _table(3, 2)[None]),
    _bad("pairs", ValueError, "at most the 4 elements of a row, got 3 pairs", torch.ones(3, 4), _table(3, 3)),
    _bad("positions", ValueError, "must leave 3 of 2 positions of `freqs_cis`, got 0", torch.ones(3, 4), _table(2, 2)),
    _bad("offset", ValueError, "must leave 3 of 4 positions .*, got 2", torch.ones(3, 4), _table(4, 2), offset=2),
    _bad("offset-negative", ValueError, "got -1", torch.ones(3, 4), _table(4, 2), offset=-1),
    _bad("offset-type", TypeError, "`offset` must be an int, got float", torch.ones(3, 4), _table(4, 2), offset=0.5),
    _bad("form", TypeError, "`interleaved` must be a bool, got int", torch.ones(3, 4), _table(3, 2), interleaved=1),
]


def _sweep() -> list[Case]:
    shapes = [(4, 32, 4096, 128), (4, 8, 4096, 128), (8, 16, 2048, 64), (2, 24, 3000, 96)]
    found = []
    for b, h, s, d in shapes:
        found.append(_case(f"B{b} H{h} S{s} D{d}", (b, h, s, d), quick=h == 32))
        found.append(_case(f"B{b} H{h} S{s} D{d} interleaved", (b, h, s, d), interleaved=True))
    return [*found, _case("B4 H32 S4096 D128 BSHD", (4, 32, 4096, 128), layout="bshd")]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Either pass reads a tensor and the table, and writes a tensor.
    input, table = (math.prod(shape) for shape in case.shapes if shape is not None)
    return 2 * input * itemsize + 8 * table


def _flops(case: Case, backward: bool) -> int:
    # Four products and two sums for a pair.
    *rows, _ = case.shapes[0] or ()
    return 6 * math.prod(rows) * (case.shapes[1] or (0, 0))[1]


SPEC = register_spec(
    Spec(
        name="rope",
        reference=naive,
        builtin=None,  # PyTorch has none
        check=check,
        samples=SAMPLES,
        errors=ERRORS,
        sweep=_sweep(),
        bytes=_bytes,
        flops=_flops,
    )
)

register("rope", "torch.naive", forward=lambda *inputs, **options: (naive(*inputs, **options), ()))
