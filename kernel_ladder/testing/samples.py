"""Make the tensors that a :class:`~kernel_ladder.spec.Case` describes, for the tests and the benchmark."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from kernel_ladder.semantics.float8 import FLOAT8
from kernel_ladder.semantics.norms import computation_dtype
from kernel_ladder.spec import Case, Inputs, Options, Output, Spec, each, has_gradient

LAYOUTS = ("contiguous", "transposed", "strided", "sliced", "halves", "expanded", "bshd")
_CLASSES = ("classes", "some_classes", "no_classes")
_NUMBERS = ("float8", "scale", "bias")
_OFFSETS = ("offsets", "equal_offsets")
_BOOLEANS = ("boolean", "hidden_rows")
KINDS = (*_BOOLEANS, "lengths", "pages", "parameter", "rotations", "starts", *_OFFSETS, *_NUMBERS, *_CLASSES)
VALUES = ("normal", "large", "outliers", "offset", "neg_inf_rows", "lowest_rows", "nan", "inf", "constant", "falling")


def _layout(shape: tuple[int, ...], layout: str, make: Callable[[tuple[int, ...]], torch.Tensor]) -> torch.Tensor:
    """A tensor of `shape` in the named memory layout, its values from ``make(shape)``."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known are {', '.join(LAYOUTS)}")
    if layout == "contiguous" or not shape:
        return make(shape)
    if layout == "transposed":  # the last two dimensions swapped in memory; a vector has stride 2
        if len(shape) < 2:
            return make((*shape, 2))[..., 0]
        return make((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
    if layout == "strided":  # every second element of the last dimension
        return make((*shape[:-1], 2 * shape[-1]))[..., ::2]
    if layout == "sliced":  # rows cut out of wider ones, at an offset that breaks 16-byte alignment
        return make((*shape[:-1], shape[-1] + 3))[..., 1 : 1 + shape[-1]]
    if layout == "halves":  # the second half of rows twice as wide: strided rows, each contiguous
        return make((*shape[:-1], 2 * shape[-1]))[..., shape[-1] :]
    if layout == "bshd":  # (..., S, H, D) in memory, seen as (..., H, S, D)
        return make((*shape[:-3], shape[-2], shape[-3], shape[-1])).transpose(-2, -3)
    return make((1, *shape[1:])).expand(shape)  # zero stride in the first dimension


def _number(kind: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of an argument of float8 products, or of what goes with them, in a case of a dtype."""
    if kind == "bias":
        return torch.float32 if dtype == torch.float64 else dtype
    return FLOAT8 if kind == "float8" else torch.float32


@contextmanager
def on_absent_gpu(case: Case, dtype: torch.dtype, *, gradients: bool) -> Iterator[Inputs]:
    """In the block, inputs of a case on a GPU that need not be there: shapes and strides alone, for ``unsupported``.

    With `gradients` they require them. Without a CUDA driver PyTorch's engine ends the process when it records a view
    of such a tensor. So it is off, and whoever asks whether it is on is told `gradients`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    described = empty_inputs(case, dtype, "meta")
    asked = mock.patch.object(torch, "is_grad_enabled", return_value=gradients)
    with FakeTensorMode(), torch.no_grad(), asked, warnings.catch_warnings():
        # Tensors without memory start nowhere, and are taken to start where they should.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        fakes = each(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda"), described)
        yield tuple(x.requires_grad_(gradients) if has_gradient(x) else x for x in fakes)


def empty_inputs(case: Case, dtype: torch.dtype, device: torch.device | str) -> Inputs:
    """The tensors of `case` without its values, for example on the device "meta"."""

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def argument(place: int, shape: tuple[int, ...] | None) -> torch.Tensor | None:
        if shape is None or place not in case.kinds:
            return None if shape is None else _layout(shape, case.layout_of(place), make)
        if case.kinds[place] == "parameter":
            return make(shape).to(computation_dtype(dtype))
        if case.kinds[place] in _NUMBERS:
            number = _number(case.kinds[place], dtype)
            return _layout(shape, case.layout_of(place), lambda shape: make(shape).to(number))
        integers = {
            **dict.fromkeys((*_OFFSETS, "lengths", "pages", "starts"), torch.int32),
            **dict.fromkeys(_CLASSES, torch.int64),
        }
        kind = {**integers, "rotations": torch.complex64}.get(_kind(case, place)[0], torch.bool)
        return torch.empty(shape, dtype=kind, device=device)

    return tuple(argument(place, shape) for place, shape in enumerate(case.shapes))


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Inputs:
    """The tensors of `case`, one per entry of ``case.shapes``. One seed gives the same values on one device type.

    Values are drawn in float32 from a standard normal distribution, then rounded to `dtype`:

    - ``normal``: as drawn; ``large``: times 100; ``constant``: one value, so that sums cancel exactly
    - ``outliers``: one element in 997 times 100, in places that are spread over rows and columns
    - ``offset``: plus 1000, a mean whose square hides the variance
    - ``falling``: the first half of each row plus 200, so that a maximum is met early and must be kept
    - ``neg_inf_rows``: some −inf, and (of two or more rows) the first row all −inf; ``lowest_rows``: the same with the
      lowest number of `dtype`, which users also write into masks
    - ``nan`` and ``inf``: one element in seven replaced by NaN, or by ±inf

    The arguments that ``case.kinds`` names are contiguous, save those of float8 and their bias:

    - ``float8``: e4m3, clamped to its largest number; ``bias``: of float32 in place of float64, else of their dtype
    - ``scale``: float32, from 0.5 to 1.5
    - ``parameter``: of float32 beside 16-bit arguments, else of their dtype
    - ``boolean``: three in four are True; ``hidden_rows``: likewise, but every third row is False throughout
    - ``rotations``: complex64 numbers of modulus one
    - ``classes``: int64 labels of the first argument's classes, its second dimension or its only one; ``classes@1``:
      of as many as the first dimension of argument 1; ``some_classes``: every third is the option `ignore_index`;
      ``no_classes``: all are
    - ``offsets@1``: int32, from 0 up to the first dimension of argument 1, as :func:`offsets` gives them;
      ``equal_offsets@1``: as :func:`equal_offsets` does; ``offsets:0,3,7``: exactly these
    - ``pages@1``: int32 numbers of pages of argument 1, in random order; each occurs once, if there are enough pages
    - ``lengths@3,1``: int32, up to the keys in a row of argument 3's pages of argument 1, as :func:`lengths_of` gives
      them; ``lengths:5,0,7``: exactly these
    - ``starts@0,1``: int32, positions in argument 1 from which there is room for the rows of argument 0 and the option
      `offset`, as :func:`starts_of` gives them; ``starts:5,0,7``: exactly these
    """
    if case.values not in VALUES:
        raise ValueError(f"unknown values {case.values!r}; known are {', '.join(VALUES)}")
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)

    def make(shape: tuple[int, ...], to: torch.dtype = dtype) -> torch.Tensor:
        draw = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(shape, generator=generator, device=device, dtype=draw)
        if case.values == "large":
            x = x * 100
        elif case.values == "outliers":
            x.view(-1)[::997] *= 100
        elif case.values == "offset":
            x = x + 1000
        elif case.values == "falling":
            x[..., : x.shape[-1] // 2] += 200
        elif case.values == "constant":
            x = torch.full_like(x, 1.5)
        elif case.values in ("neg_inf_rows", "lowest_rows"):
            low = -torch.inf if case.values == "neg_inf_rows" else torch.finfo(dtype).min
            x.view(-1)[::5] = low
            if x.dim() > 1 and x.shape[0] > 1:
                x[0] = low
        elif case.values == "nan":
            x.view(-1)[::7] = torch.nan
        elif case.values == "inf":
            x.view(-1)[::7] = torch.inf
            x.view(-1)[3::14] = -torch.inf
        if to is FLOAT8:  # which has no infinity
            x = x.clamp(-torch.finfo(FLOAT8).max, torch.finfo(FLOAT8).max)
        return x.to(to)

    def argument(place: int, shape: tuple[int, ...] | None) -> torch.Tensor | None:
        if shape is None:
            return None
        if case.kinds.get(place) == "parameter":
            return make(shape, computation_dtype(dtype))
        if case.kinds.get(place) == "scale":
            return torch.rand(shape, generator=generator, device=device) + 0.5
        if case.kinds.get(place) in ("float8", "bias"):
            number = _number(case.kinds[place], dtype)
            return _layout(shape, case.layout_of(place), lambda shape: make(shape, number))
        if place in case.kinds:
            return _of_kind(case, place, shape, generator)
        return _layout(shape, case.layout_of(place), make)

    return tuple(argument(place, shape) for place, shape in enumerate(case.shapes))


def offsets(rows: int, count: int) -> list[int]:
    """`count` offsets from 0 to `rows`, with growing differences."""
    return [rows * i * i // (count - 1) ** 2 for i in range(count)]


def equal_offsets(rows: int, count: int) -> list[int]:
    """`count` offsets from 0 to `rows`, with differences that are equal, or one apart where they cannot be."""
    return [rows * i // (count - 1) for i in range(count)]


def offsets_of(case: Case, place: int) -> list[int]:
    """The offsets that a case's argument of this kind holds."""
    kind, separator, detail = _kind(case, place)
    if separator == ":":
        return [int(n) for n in detail.split(",")]
    (rows, *_), (count, *_) = case.shapes[int(detail)] or (0,), case.shapes[place] or (0,)
    return (equal_offsets if kind == "equal_offsets" else offsets)(rows, count)


def lengths_of(case: Case, place: int) -> list[int]:
    """The lengths that a case's argument of this kind holds; unless it names them, from all keys of a row to half."""
    _, separator, detail = _kind(case, place)
    if separator == ":":
        return [int(n) for n in detail.split(",") if n]
    (count, *_), (table, cache) = case.shapes[place] or (0,), (case.shapes[int(n)] or (0, 0) for n in detail.split(","))
    keys = table[1] * cache[1]
    return [keys - keys // 2 * i // count for i in range(count)]


def starts_of(case: Case, place: int) -> list[int]:
    """The first positions that a case's argument of this kind holds; unless it names them, over all of the table."""
    _, separator, detail = _kind(case, place)
    if separator == ":":
        return [int(n) for n in detail.split(",") if n]
    (count, *_), (rows, table) = case.shapes[place] or (0,), (case.shapes[int(n)] or (0, 0) for n in detail.split(","))
    room = table[0] - rows[-2] - case.options["offset"]
    return offsets(room, count) if count > 1 else [room] * count


def _kind(case: Case, place: int) -> list[str]:
    """The name of an argument's kind, then a separator and detail, which may be empty."""
    return re.split(r"([:@]|$)", case.kinds[place], maxsplit=1)


def _of_kind(case: Case, place: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    kind, _, detail = _kind(case, place)
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known are {', '.join(KINDS)}")
    if kind == "lengths":
        return torch.tensor(lengths_of(case, place), dtype=torch.int32, device=generator.device)
    if kind == "starts":
        return torch.tensor(starts_of(case, place), dtype=torch.int32, device=generator.device)
    if kind == "pages":
        (pages, *_), needed = case.shapes[int(detail)] or (0,), shape[0] * shape[1]
        order = torch.randperm(max(pages, needed), generator=generator, device=generator.device)
        return (order[:needed] % max(pages, 1)).view(shape).int()
    if kind in _OFFSETS:
        return torch.tensor(offsets_of(case, place), dtype=torch.int32, device=generator.device)
    if kind in _CLASSES:
        logits = case.shapes[0] or (1,)
        classes = (case.shapes[int(detail)] or (1,))[0] if detail else logits[min(1, len(logits) - 1)]
        found = torch.randint(classes, shape, generator=generator, device=generator.device)
        if kind != "classes":
            found.view(-1)[:: 3 if kind == "some_classes" else 1] = case.options["ignore_index"]
        return found
    if kind == "rotations":
        angles = 2 * torch.pi * torch.rand(shape, generator=generator, device=generator.device)
        return torch.polar(torch.ones_like(angles), angles)
    seen = torch.rand(shape, generator=generator, device=generator.device) < 0.75
    if kind == "hidden_rows":
        seen[..., ::3, :] = False
    return seen


def make_grad(spec: Spec, inputs: Inputs, options: Options, seed: int = 1) -> Output:
    """Random gradients for an operation's outputs: a tensor, or a tuple if there are several outputs."""
    outputs = spec.outputs(inputs, options)
    grads = make_inputs(Case("grad", tuple(x.shape for x in outputs)), inputs[0].dtype, inputs[0].device, seed)
    grads = tuple(grad.to(x.dtype) for grad, x in zip(grads, outputs, strict=True))
    return grads if len(grads) > 1 else grads[0]
