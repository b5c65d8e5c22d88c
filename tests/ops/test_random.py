"""Random calls of every operation but attention and matmul, which have files of their own: shapes, layouts, options and
dtypes, both passes against float64. ``--random-calls N`` draws N of each; on a GPU, where Triton compiles anew for most
of them, no other run draws any.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import kernel_ladder
from kernel_ladder import table
from kernel_ladder.spec import Case, Output, as_leaves, as_tuple
from kernel_ladder.testing.agreement import agreement, standards
from kernel_ladder.testing.deviation import Deviation
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, skip_unless_available

ON_GPU = DEVICE.type == "cuda"
LARGEST = 200_000 if ON_GPU else 2_000  # elements: without a GPU Triton is interpreted
CALLS = 6
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Times the bound of the agreement check. The formula's own luck sets that: one call in a thousand is a seventh beyond.
SLACK = 2.0

Draw = Callable[[st.SearchStrategy], Any]
sizes = st.one_of(st.integers(1, 9), st.sampled_from((16, 31, 32, 33, 64, 100, 128, 129, 256)), st.integers(1, 300))


class Layout(NamedTuple):
    """Where a tensor's elements lie: the order of dimensions in memory, elements apart, elements before the first."""

    order: tuple[int, ...]
    step: int
    before: int

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """`x` in this layout."""
        dense = x.permute(self.order).contiguous()
        space = x.new_zeros(self.before + dense.numel() * self.step)
        held = space[self.before :: self.step][: dense.numel()].view(dense.shape)
        held.copy_(dense)
        return held.permute([self.order.index(i) for i in range(x.dim())])


def shape_of(draw: Draw, least: int = 1, most: int = 4) -> tuple[int, ...]:
    """A shape of at most LARGEST elements."""
    shape = draw(st.lists(sizes, min_size=least, max_size=most))
    while math.prod(shape) > LARGEST:
        widest = shape.index(max(shape))
        shape[widest] = max(1, shape[widest] // 2)
    if draw(st.integers(0, 15)) == 0:
        shape[draw(st.integers(0, len(shape) - 1))] = 0
    return tuple(shape)


def layout_of(draw: Draw, dims: int) -> Layout:
    order = draw(st.one_of(st.just(tuple(range(dims))), st.permutations(range(dims)).map(tuple)))
    return Layout(order, draw(st.sampled_from((1, 1, 1, 2, 3))), draw(st.sampled_from((0, 0, 1, 3, 8))))


def elementwise(draw: Draw, count: int) -> tuple[tuple, dict]:
    return (shape_of(draw),) * count, {}


def gelu(draw: Draw) -> tuple[tuple, dict]:
    return elementwise(draw, 1)[0], {"approximate": draw(st.sampled_from(("none", "tanh")))}


def add(draw: Draw) -> tuple[tuple, dict]:
    shape = shape_of(draw)
    other = tuple(draw(st.sampled_from((size, size, 1))) for size in shape)[draw(st.integers(0, len(shape))) :]
    return draw(st.sampled_from(((shape, other), (other, shape)))), {}


def softmax(draw: Draw) -> tuple[tuple, dict]:
    shape = shape_of(draw)
    return (shape,), {"dim": draw(st.integers(-len(shape), -1))}


def total(draw: Draw) -> tuple[tuple, dict]:
    shape = shape_of(draw)
    dims = draw(st.one_of(st.none(), st.integers(-len(shape), -1)))
    return (shape,), {"dim": dims, "keepdim": draw(st.booleans())}


def bias_gelu(draw: Draw) -> tuple[tuple, dict]:
    shape = shape_of(draw)
    return (shape, shape[-1:]), {"approximate": draw(st.sampled_from(("none", "tanh")))}


def norm(draw: Draw, parameters: int) -> tuple[tuple, dict]:
    shape = shape_of(draw)
    row = shape[-draw(st.integers(1, len(shape))) :]
    given = tuple(draw(st.sampled_from((row, row, None))) for _ in range(parameters))
    return (shape, *given), {"normalized_shape": row, "eps": 1e-5}


def add_rms_norm(draw: Draw) -> tuple[tuple, dict]:
    shape = shape_of(draw)
    return (shape, shape, draw(st.sampled_from((shape[-1:], None)))), {"eps": None}


def chain(draw: Draw) -> tuple[tuple, dict]:
    *rows, width = shape_of(draw)
    row = (max(width, 8),)  # two numbers that are nearly equal have no deviation to divide by
    shape = (*rows, *row)
    given = (draw(st.sampled_from((row, None))) for _ in range(2))
    options = {"p": draw(st.sampled_from((0.0, 0.1, 0.5, 0.9))), "seed": draw(st.integers(0, 2**40)), "eps": 1e-5}
    return (shape, row, shape, *given), options


def dropout(draw: Draw) -> tuple[tuple, dict]:
    options = {"p": draw(st.sampled_from((0.0, 0.1, 0.5, 0.9))), "seed": draw(st.integers(0, 2**40))}
    return elementwise(draw, 1)[0], options


def linear(draw: Draw) -> tuple[tuple, dict]:
    (*rows, k), n = shape_of(draw, 1, 3), draw(sizes)
    k = max(1, min(k, LARGEST // max(n, 1)))
    activation = draw(st.sampled_from((None, "gelu", "gelu_tanh")))
    return ((*rows, k), (n, k), draw(st.sampled_from(((n,), None)))), {"activation": activation}


def rope(draw: Draw) -> tuple[tuple, dict]:
    shape = shape_of(draw, 2, 4)
    *outer, positions, d = shape
    pairs = draw(st.integers(1, max(1, d // 2)))
    offset = draw(st.integers(0, 3))
    shape = (*outer, positions, max(d, 2 * pairs))
    return (shape, (positions + offset, pairs)), {"interleaved": draw(st.booleans()), "offset": offset}


def loss_options(draw: Draw) -> dict:
    return {
        "ignore_index": -100,
        "reduction": draw(st.sampled_from(("mean", "sum", "none"))),
        "label_smoothing": draw(st.sampled_from((0.0, 0.0, 0.1))),
        "z_loss": draw(st.sampled_from((0.0, 0.0, 1e-3))),
    }


def cross_entropy(draw: Draw) -> tuple[tuple, dict]:
    shape = shape_of(draw, 2, 4)
    shape = (shape[0], max(shape[1], 2), *shape[2:])  # the gradient of one class is zero
    return (shape, (shape[0], *shape[2:])), loss_options(draw)


def linear_cross_entropy(draw: Draw) -> tuple[tuple, dict]:
    rows, k = shape_of(draw, 2, 2)
    classes = max(2, min(draw(sizes), LARGEST // max(k, 1)))
    return ((rows, max(k, 1)), (classes, max(k, 1)), (rows,)), {**loss_options(draw), "wide_loss": draw(st.booleans())}


DRAWN: dict[str, Callable[[Draw], tuple[tuple, dict]]] = {
    "gelu": gelu,
    "softmax": softmax,
    "add": add,
    "sum": total,
    "layer_norm": lambda draw: norm(draw, 2),
    "rms_norm": lambda draw: norm(draw, 1),
    "dropout": dropout,
    "bias_gelu": bias_gelu,
    "swiglu": lambda draw: elementwise(draw, 2),
    "add_rms_norm": add_rms_norm,
    "bias_dropout_add_layer_norm": chain,
    "linear": linear,
    "rope": rope,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
}
KINDS = {"rope": {1: "rotations"}, "cross_entropy": {1: "some_classes"}, "linear_cross_entropy": {2: "some_classes@1"}}


class Call(NamedTuple):
    case: Case
    dtype: torch.dtype
    layouts: tuple[Layout, ...]
    of_grad: tuple[Layout, ...]


@st.composite
def calls(draw, op: str) -> Call:
    shapes, options = DRAWN[op](draw)
    case = Case("", shapes, options, kinds=KINDS.get(op, {}))
    layouts = tuple(layout_of(draw, len(shape or ())) for shape in shapes)
    spec = kernel_ladder.spec(op)
    outputs = spec.output_shapes(make_inputs(case, torch.float32, "cpu"), options)
    return Call(case, draw(st.sampled_from(DTYPES)), layouts, tuple(layout_of(draw, len(shape)) for shape in outputs))


def within(times: float, found: Deviation) -> bool:
    return found.reason is None and found.error <= times * found.bound and found.norm_error <= times * found.norm_bound


def check(op: str, call: Call, level: str) -> int:
    """Hold every rung of a level that takes a call; return how many do."""
    spec, case = kernel_ladder.spec(op), call.case
    inputs = make_inputs(case, call.dtype, DEVICE)
    inputs = tuple(
        x if x is None or not x.is_floating_point() else layout.of(x)
        for x, layout in zip(inputs, call.layouts, strict=True)
    )
    grad: Output = make_grad(spec, inputs, case.options)
    if op == "linear_cross_entropy":  # its gradients are made in the forward pass, and another factor rounds them anew
        grad = torch.ones_like(grad)
    grads = tuple(layout.of(x) for x, layout in zip(as_tuple(grad), call.of_grad, strict=True))
    grad = grads if isinstance(grad, tuple) else grads[0]
    leaves = as_leaves(inputs)
    takers = [v.name for v in table.variants(op, level) if v.unsupported(*leaves, **case.options) is None]
    if not takers:
        return 0
    to = standards(spec, inputs, case.options, grad)
    names = list(spec.named(tuple(torch.Tensor if x is None else x for x in inputs)))
    function = getattr(kernel_ladder, op)
    for name in takers:

        def run(*given, name=name, **options):
            return function(**dict(zip(names, given, strict=False)), **options, backend=name)

        result = agreement(spec, run, inputs, case.options, grad, to=to)
        assert all(within(SLACK, deviation) for deviation in result.deviations), f"{name} {call}: {result}"
    return len(takers)


@pytest.mark.parametrize("level", ["triton", "cuda"])
@pytest.mark.parametrize("op", DRAWN)
def test_random_calls(op, level, request):
    skip_unless_available(op, level)
    asked_for = request.config.getoption("--random-calls")
    if ON_GPU and not asked_for:
        pytest.skip("on a GPU `--random-calls N` draws calls")
    examples = asked_for or CALLS
    checked = 0

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],  # a smaller call would take minutes to find
    )
    @hypothesis.given(call=calls(op))
    def draw(call):
        nonlocal checked
        checked += check(op, call, level)

    draw()
    assert checked > 0, "no rung took any of the calls"


def test_every_operation_is_drawn():
    elsewhere = {"matmul", "attention", "attention_varlen", "attention_paged", "linear_float8"}
    assert set(DRAWN) == set(kernel_ladder.OPS) - elsewhere
