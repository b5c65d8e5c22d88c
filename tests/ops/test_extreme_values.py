"""Every variant in 16 bits, on values near the largest of the dtype and on long rows, forward and backward.

In float64 each result is finite, so each must be right where its dtype holds it, and infinite only where it does not.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.spec import Inputs, Options, Output, as_leaves
from kernel_ladder.testing.agreement import Standards, agreement, oracle, standards
from kernel_ladder.testing.samples import make_grad

from ..conftest import DEVICE, public, variant_id
from ..sampling import MODES_OF_DEFAULT

DTYPES = (torch.float16, torch.bfloat16)

#: Makes values of a shape in float64, by the largest number that the dtype holds.
Values = Callable[[tuple[int, ...], float], torch.Tensor]


def alternating(part: float) -> Values:
    """±`part` of the largest, in turns along the last dimension: what is added up cancels, step by step."""

    def values(shape: tuple[int, ...], largest: float) -> torch.Tensor:
        signs = 1 - 2 * (torch.arange(shape[-1], dtype=torch.float64) % 2)
        return (part * largest * signs).expand(shape).clone()

    return values


def spread(most: float) -> Values:
    """Of both signs, from 1 to `most` of the largest in equal ratios, in an order that mixes them."""

    def values(shape: tuple[int, ...], largest: float) -> torch.Tensor:
        count = torch.Size(shape).numel()
        size = (most * largest) ** torch.linspace(0, 1, count, dtype=torch.float64)
        size[::2] *= -1
        return size[torch.randperm(count, generator=torch.Generator().manual_seed(3))].reshape(shape)

    return values


def constant(value: float) -> Values:
    return lambda shape, largest: torch.full(shape, value, dtype=torch.float64)


def normal(shape: tuple[int, ...], largest: float) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def offsets(*places: int) -> Values:
    return lambda shape, largest: torch.tensor(places, dtype=torch.int32)


def pages(shape: tuple[int, ...], largest: float) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int32).flip(0).view(shape)


class Extreme(NamedTuple):
    """Arguments of an operation: (shape, values) of each, or None. `most` bounds what `values` take for the largest."""

    id: str
    arguments: tuple[tuple[tuple[int, ...], Values] | None, ...]
    options: Options = MappingProxyType({})
    most: float = float("inf")

    def inputs(self, dtype: torch.dtype) -> Inputs:
        largest = min(torch.finfo(dtype).max, self.most)
        made = (None if a is None else a[1](a[0], largest) for a in self.arguments)
        return tuple(None if x is None else x.to(dtype if x.is_floating_point() else x.dtype).to(DEVICE) for x in made)


#: Rows whose squares float32 adds up, as PyTorch's own kernels do in every 16-bit dtype.
SQUARES = 1e15
#: The range of bfloat16 is that of float32, in which sums of a row, and products with a gradient, must find room too.
SUMS = 1e30
LONG = 65536


def _norm(op: str, *more: tuple[tuple[int, ...], Values]) -> list[Extreme]:
    options = {"eps": 1e-5} if op == "add_rms_norm" else {"normalized_shape": (LONG,), "eps": 1e-5}
    return [
        Extreme("alternating", (((1, LONG), alternating(0.5)), *more, ((LONG,), normal)), options, SQUARES),
        Extreme("spread", (((1, LONG), spread(0.4)), *more, ((LONG,), normal)), options, SQUARES),
    ]


def _registers(row: tuple[int, ...], *bias: None) -> Extreme:
    """Rows that every variant takes whole."""
    options = {"normalized_shape": row, "eps": 1e-5}
    return Extreme("registers", (((2, *row), alternating(0.5)), (row, normal), *bias), options, SQUARES)


def _gelu(form: str) -> list[Extreme]:
    return [Extreme(form, (((4, 257), spread(0.99)),), {"approximate": form}, SUMS)]


def _bias_gelu(form: str) -> list[Extreme]:
    of = {"approximate": form}
    return [
        Extreme(form, (((4, 257), spread(0.4)), ((257,), spread(0.4))), of, SUMS),
        # Its sum is more negative than float16 holds, and its GELU zero.
        Extreme(f"{form}-past", (((3, 40), constant(-60000.0)), ((40,), constant(-60000.0))), of),
    ]


def _linear(activation: str | None) -> list[Extreme]:
    of = {"activation": activation}
    return [
        Extreme(f"{activation}", (((9, 1), spread(0.9)), ((11, 1), constant(1.0)), ((11,), normal)), of, SUMS),
        Extreme(f"{activation}-long", (((2, 8192), constant(2.0)), ((3, 8192), constant(2.0)), ((3,), normal)), of),
    ]


def rotations(shape: tuple[int, ...], largest: float) -> torch.Tensor:
    return torch.polar(torch.ones(shape), torch.arange(1.0, 1.0 + math.prod(shape)).view(shape))


def classes(shape: tuple[int, ...], largest: float) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape) * 7 % 40


EXTREMES: dict[str, list[Extreme]] = {
    "cross_entropy": [
        Extreme(
            "spread",
            (((5, 40), spread(0.4)), ((5,), classes)),
            {"ignore_index": -100, "reduction": "none", "label_smoothing": 0.0, "z_loss": 0.0},
            SUMS,
        ),
    ],
    "linear_cross_entropy": [
        Extreme(
            "spread",
            (((5, 1), spread(0.1)), ((40, 1), normal), ((5,), classes)),
            {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "wide_loss": False},
            SUMS,
        ),
    ],
    "rope": [
        Extreme(f"{form}", (((3, 9, 80), spread(0.4)), ((9, 32), rotations)), {"interleaved": form, "offset": 0}, SUMS)
        for form in (False, True)
    ],
    "gelu": [*_gelu("none"), *_gelu("tanh")],
    "bias_gelu": [*_bias_gelu("none"), *_bias_gelu("tanh")],
    "linear": [*_linear(None), *_linear("gelu"), *_linear("gelu_tanh")],
    "swiglu": [
        Extreme("spread", (((4, 257), spread(0.9)), ((4, 257), spread(0.9))), most=65504.0),
        Extreme("spread-gate", (((4, 257), spread(0.9)), ((4, 257), normal)), most=SUMS),
    ],
    "softmax": [
        Extreme("zeros", (((1, LONG), constant(0.0)),), {"dim": -1}),
        Extreme("zeros-registers", (((2, 32768), constant(0.0)),), {"dim": -1}),
        Extreme("zeros-columns", (((LONG, 2), constant(0.0)),), {"dim": 0}),
        Extreme("alternating", (((2, 4096), alternating(0.99)),), {"dim": -1}),
        Extreme("spread", (((2, 4096), spread(0.99)),), {"dim": -1}),
    ],
    "layer_norm": [
        e._replace(arguments=(*e.arguments, ((LONG,), normal))) for e in _norm("layer_norm")
    ] + [_registers((4096,), None)],
    "rms_norm": [
        *_norm("rms_norm"),
        _registers((4096,)),
    ],
    "add_rms_norm": [
        *_norm("add_rms_norm", ((1, LONG), alternating(-0.4))),
        Extreme(
            "registers",
            (((2, 4096), spread(0.5)), ((2, 4096), spread(0.4)), ((4096,), normal)),
            {"eps": 1e-5},
            SQUARES,
        ),
    ],
    "bias_dropout_add_layer_norm": [
        # A kept element, doubled, is past float16 until the residual brings it back.
        Extreme(
            f"doubled-{length}",
            (
                ((2, length), alternating(0.5)),
                ((length,), alternating(0.2)),
                ((2, length), alternating(-0.7)),
                ((length,), normal),
                ((length,), normal),
            ),
            {"p": 0.5, "seed": 7, "eps": 1e-5},
            60000.0,
        )
        for length in (4096, 40000)
    ],
    "sum": [
        Extreme("ones", (((1, 60000), constant(1.0)),), {"dim": -1, "keepdim": False}),
        Extreme("alternating", (((3, LONG), alternating(0.99)),), {"dim": -1, "keepdim": False}, SUMS),
        Extreme("columns", (((LONG, 3), constant(0.5)),), {"dim": 0, "keepdim": False}),
        Extreme("all", (((256, 200), alternating(0.99)),), {"dim": None, "keepdim": False}, SUMS),
    ],
    "matmul": [
        Extreme("twos", (((2, 8192), constant(2.0)), ((8192, 3), constant(2.0)))),
        Extreme("alternating", (((3, 4096), alternating(0.99)), ((4096, 2), constant(1.0))), most=SUMS),
    ],
    "dropout": [Extreme("spread", (((4, 257), spread(0.99)),), {"p": 0.5, "seed": 3})],
    "add": [Extreme("spread", (((4, 257), spread(0.99)), ((4, 257), alternating(0.99))))],
    "attention_varlen": [
        Extreme(
            "equal-keys",
            (
                ((2, 1, 8), normal),
                ((70000, 1, 8), constant(0.0)),
                ((70000, 1, 8), normal),
                ((2,), offsets(0, 2)),
                ((2,), offsets(0, 70000)),
            ),
            {"max_seqlen_q": 2, "max_seqlen_k": 70000, "is_causal": False, "scale": None, "enable_gqa": False},
        ),
        # Scores of up to 80,000, past float16, of which the scale leaves 8.
        Extreme(
            "large-scores",
            (
                ((5, 1, 8), alternating(100 / 65504)),
                ((7, 1, 8), alternating(100 / 65504)),
                ((7, 1, 8), normal),
                ((2,), offsets(0, 5)),
                ((2,), offsets(0, 7)),
            ),
            {"max_seqlen_q": 5, "max_seqlen_k": 7, "is_causal": False, "scale": 1e-4, "enable_gqa": False},
            65504.0,
        ),
    ],
    # Scores of up to 80,000, past float16, of which the scale leaves 8.
    "attention_paged": [
        Extreme(
            "large-scores",
            (
                ((2, 1, 3, 8), alternating(100 / 65504)),
                ((4, 4, 1, 8), alternating(100 / 65504)),
                ((4, 4, 1, 8), normal),
                ((2, 2), pages),
                ((2,), offsets(7, 5)),
            ),
            {"is_causal": True, "scale": 1e-4, "enable_gqa": False},
            65504.0,
        ),
    ],
}  # fmt: skip


class Departure(NamedTuple):
    """What PyTorch's own functions do not get right, and why."""

    op: str
    variants: tuple[str, ...]
    cases: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    reason: str


_TANH = "PyTorch multiplies a slope of zero by a square that overflows float32"
KNOWN = [
    Departure("gelu", ("torch.builtin",), ("tanh",), (torch.bfloat16,), _TANH),
    Departure("bias_gelu", ("torch.builtin",), ("tanh",), (torch.bfloat16,), _TANH),
    Departure("linear", ("torch.builtin",), ("gelu_tanh",), (torch.bfloat16,), _TANH),
    Departure(
        *("attention_varlen", ("xla.jit",), ("large-scores",), (torch.float16,)),
        "the gradient of scores is rounded to float16, as FlashAttention's: times a scale of 1e-4 it is subnormal",
    ),
]
if DEVICE.type == "cuda":
    KNOWN.append(
        Departure(
            *("linear", ("xla.jit",), ("None",), (torch.float16,)),
            "XLA may keep the partial sums of a product with one column in float16, past whose range they are",
        )
    )


def known_departure(op: str, variant: str, case: str, dtype: torch.dtype) -> str | None:
    for known in KNOWN:
        # Compiled, PyTorch's function is as wrong as it is.
        compiled = variant.startswith("compile.") and variant != "compile.formula" and "torch.builtin" in known.variants
        if op == known.op and (variant in known.variants or compiled) and case in known.cases and dtype in known.dtypes:
            return known.reason
    return None


@functools.lru_cache(maxsize=8)
def expected(op: str, index: int, dtype: torch.dtype) -> tuple[Inputs, Output, Standards]:
    spec, case = kernel_ladder.spec(op), EXTREMES[op][index]
    inputs = case.inputs(dtype)
    grad = make_grad(spec, inputs, case.options)
    for name, exact in oracle(spec, inputs, case.options, grad).items():
        assert exact.isfinite().all(), f"{case.id}: {name} is to be finite in float64"
    return inputs, grad, standards(spec, inputs, case.options, grad)


def parameters():
    """Every variant in each dtype, interpreted ones in one by turns; once one that does not run here, and why."""
    for op in EXTREMES:
        here = []
        for variant in table.variants(op):
            if op == "attention_varlen" and variant.name in MODES_OF_DEFAULT:
                continue
            if op == "attention_paged" and variant.level == "compile" and DEVICE.type == "cpu":
                continue  # a C++ compiler takes half a minute for its gather; attention's products are the same
            reason = table.unavailable(op, variant.level) or variant.here()
            if reason is None:
                here.append(variant)
            else:
                yield pytest.param(variant, None, id=variant_id(variant), marks=pytest.mark.skip(reason=reason))
        for (i, dtype), (j, variant) in itertools.product(enumerate(DTYPES), enumerate(here)):
            if variant.level != "triton" or DEVICE.type == "cuda" or i == j % len(DTYPES):
                yield pytest.param(variant, dtype, id=f"{variant_id(variant)}-{str(dtype).removeprefix('torch.')}")


def test_every_operation_has_extreme_values():
    elsewhere = {"attention", "linear_float8"}  # in test_large_scores.py and test_linear_float8.py
    assert set(EXTREMES) | elsewhere == set(kernel_ladder.OPS)


@pytest.mark.sampled
@pytest.mark.parametrize(("variant", "dtype"), list(parameters()))
def test_extreme_values(variant, dtype):
    spec, refused, failed = kernel_ladder.spec(variant.op), [], []

    def call(*inputs, **options):
        return public(variant.op, inputs, options, backend=variant.name)

    for index, case in enumerate(EXTREMES[variant.op]):
        if known_departure(variant.op, variant.name, case.id, dtype):
            continue
        if case.id == "equal-keys" and variant.level == "triton" and DEVICE.type == "cpu":
            continue  # the interpreter goes through its thousand tiles for minutes
        inputs, grad, to = expected(variant.op, index, dtype)
        if (reason := variant.unsupported(*as_leaves(inputs), **case.options)) is not None:
            refused.append(reason)
            continue
        result = agreement(spec, call, inputs, case.options, grad, to=to)
        if not result.agrees:
            failed.append(f"{case.id}: {result}")
    assert not failed, "\n".join(failed)
    if len(refused) == len(EXTREMES[variant.op]):
        pytest.skip(refused[0])
