"""Rotary position embedding: pairs of a row's elements are rotated by angles that grow with the row's position.

(y₁, y₂) = (x₁ · cos − x₂ · sin, x₂ · cos + x₁ · sin), or y = x · e^(iθ) for a pair as a complex number

Source: Su et al., RoFormer, arXiv:2104.09864. Interleaved pairs are neighbours, as in that paper. Otherwise a pair is
element i and element i + R / 2, as in GPT-NeoX and Llama. The angles of each position are a table of e^(iθ).

A row's position is its place in its sequence, plus an offset. Sequences of a batch can have offsets of their own, as in
decoding with a cache (FlashAttention's ``apply_rotary_emb`` names them ``seqlen_offsets``).
"""

import math

import torch

from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.semantics.rotary import check_offset, check_offsets
from kernel_ladder.spec import DTYPES, Case, ErrorCase, Spec, check_tensors, dtype_name
from kernel_ladder.table import register, register_spec
from kernel_ladder.testing.samples import starts_of


def naive(
    input: torch.Tensor,
    freqs_cis: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    offset: int = 0,
) -> torch.Tensor:
    """The formula in float32 or wider, one kernel per operator."""
    rotated, wide = 2 * freqs_cis.shape[1], computation_dtype(input.dtype)
    if offsets is None:
        table = torch.view_as_real(freqs_cis.resolve_conj()[offset : offset + input.shape[-2]]).to(wide)
    else:
        table = _of_sequences(freqs_cis, offsets, offset, input).to(wide)
    cos, sin = table[..., 0], table[..., 1]
    x = input[..., :rotated].to(wide)
    if interleaved:
        x1, x2 = x[..., 0::2], x[..., 1::2]
        y = torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).flatten(-2)
    else:
        x1, x2 = x.chunk(2, dim=-1)
        y = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
    return torch.cat([y.to(input.dtype), input[..., rotated:]], dim=-1)


def _of_sequences(freqs_cis: torch.Tensor, offsets: torch.Tensor, offset: int, input: torch.Tensor) -> torch.Tensor:
    """The angles of each sequence's rows, ``(B, 1, ..., 1, S, pairs, 2)``. Those of no position are NaN."""
    angles, rows = torch.view_as_real(freqs_cis.resolve_conj()), input.shape[-2]
    position = (offsets.long() + offset)[:, None] + torch.arange(rows, device=offsets.device)
    inside = (position >= 0) & (position < angles.shape[0])
    chosen = angles.index_select(0, position.clamp(0, max(angles.shape[0] - 1, 0)).flatten())
    chosen = chosen.unflatten(0, position.shape).where(inside[..., None, None], math.nan)
    return chosen[(slice(None), *(None,) * (input.dim() - 3))]


def check(
    input: torch.Tensor,
    freqs_cis: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *,
    interleaved: bool,
    offset: int,
) -> None:
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
    if offsets is None:
        check_offset(offset, input.shape[-2], positions)
    else:
        check_offsets(input, offsets, offset, positions)


def _case(
    id: str,
    shape: tuple[int, ...],
    pairs: int | None = None,
    interleaved: bool = False,
    offset: int = 0,
    layout: str = "contiguous",
    values: str = "normal",
    starts: str | None = None,
    positions: int | None = None,
    **more: bool,
) -> Case:
    """A case. `starts` is the kind of the sequences' offsets, `positions` the table's; None is the fewest."""
    table = (shape[-2] + offset if positions is None else positions, shape[-1] // 2 if pairs is None else pairs)
    options = {"interleaved": interleaved, "offset": offset}
    shapes, kinds = (shape, table), {1: "rotations"}
    if starts is not None:
        return Case(id, (*shapes, shape[:1]), options, layout, values, kinds={**kinds, 2: starts}, **more)
    return Case(id, shapes, options, layout=layout, values=values, kinds=kinds, **more)


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
    _case("offsets", (3, 5, 9, 64), starts="starts@0,1", positions=40),
    _case("equal-offsets", (2, 3, 5, 32), interleaved=True, starts="starts:4,4", positions=11),
    _case("offsets-and-offset", (3, 2, 5, 40), 8, offset=-3, starts="starts:5,3,9", positions=11),
    _case("one-token", (5, 6, 1, 128), starts="starts:0,100,7,7,63", positions=101, layout="bshd"),
    _case("offsets-no-heads", (3, 37, 80), 16, True, 2, starts="starts@0,1", positions=70),
    _case("offsets-no-sequences", (0, 3, 5, 16), starts="starts:", positions=5),
    _case("offsets-no-positions", (2, 3, 0, 16), starts="starts:0,0", positions=0),
    _case("offsets-nothing-rotated", (2, 3, 6), 0, starts="starts:0,1", positions=4),
]


def _table(positions: int, pairs: int) -> torch.Tensor:
    return torch.ones(positions, pairs, dtype=torch.complex64)


_X, _TABLE, _STARTS = torch.ones(2, 3, 4), _table(5, 2), torch.zeros(2, dtype=torch.int32)

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
    _bad("offsets-list", TypeError, r"`offsets` must be a torch\.Tensor or None, got list", _X, _TABLE, [0, 1]),
    _bad("offsets-int64", TypeError, "`offsets` has dtype int64; accepted is int32", _X, _TABLE, _STARTS.long()),
    _bad("offsets-rows", ValueError, r"`offsets` must have shape \(2,\), .* got \(1,\)", _X, _TABLE, _STARTS[:1]),
    _bad("offsets-matrix", ValueError, "at least three dimensions, .* got 2", _X[0], _TABLE, _STARTS[:1]),
    _bad("offsets-high", ValueError, "leave 3 of 5 positions .* got 3 for sequence 0", _X, _TABLE, _STARTS + 3),
    _bad("offsets-low", ValueError, "to each sequence, got -1 for sequence 0", _X, _TABLE, _STARTS - 1),
    _bad("offsets-sum", ValueError, "got 2 \\+ 1 for sequence 0", _X, _TABLE, _STARTS + 1, offset=2),
    _bad("offsets-none-right", ValueError, "3 of 2 positions .* beside some `offsets`", _X, _table(2, 2), _STARTS),
    _bad("offset-lowest", ValueError, "beside some `offsets` of int32, got -", _X, _TABLE, _STARTS, offset=-(2**31)),
]


def _sweep() -> list[Case]:
    shapes = [(4, 32, 4096, 128), (4, 8, 4096, 128), (8, 16, 2048, 64), (2, 24, 3000, 96)]
    found = []
    for b, h, s, d in shapes:
        found.append(_case(f"B{b} H{h} S{s} D{d}", (b, h, s, d), quick=h == 32))
        found.append(_case(f"B{b} H{h} S{s} D{d} interleaved", (b, h, s, d), interleaved=True))
    found.append(_case("B4 H32 S4096 D128 BSHD", (4, 32, 4096, 128), layout="bshd"))
    # A prompt, and one token of each of many sequences: the positions of a batch that a server makes up.
    found.append(_case("B4 H32 S4096 D128 offsets", (4, 32, 4096, 128), starts="starts@0,1", positions=8192))
    return [*found, _case("B96 H32 S1 D128 offsets", (96, 32, 1, 128), starts="starts@0,1", positions=8192)]


def _bytes(case: Case, itemsize: int, backward: bool) -> int:
    # Either pass reads a tensor and the table, and writes a tensor.
    (*rows, width), (positions, pairs), *starts = (shape or () for shape in case.shapes)
    moved = 2 * math.prod(rows) * width * itemsize
    if not starts:
        return moved + 8 * positions * pairs
    # Of the table the rows at which some sequence stands, and an offset for each.
    first = starts_of(case, 2)
    stood_at = {case.options["offset"] + n + i for n in set(first) for i in range(rows[-1])}
    return moved + 8 * len(stood_at) * pairs + 4 * len(first)


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
