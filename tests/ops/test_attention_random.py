"""Random calls of attention and of packed sequences, both passes against float64: ``--random-calls N`` draws N of each.

The rungs of a level share one draw and its float64 reference, so that most of the time goes to the rungs themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.semantics import sinks as of_sinks
from kernel_ladder.semantics.masks import LOWER_RIGHT, NO_WINDOW, band, seen
from kernel_ladder.spec import Case, Inputs, Output, as_leaves
from kernel_ladder.testing.agreement import agreement, standards
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, skip_unless_available

ON_GPU = DEVICE.type == "cuda"
#: By level: tests that share the calls, and of how many calls one is drawn. Triton compiles most of its calls anew.
SHARES = {"cuda": (20, 1), "triton": (4, 10)}
#: Calls without the option. On a CPU, Triton is interpreted.
CALLS = 400 if ON_GPU else 40

#: Head dimensions of query and value, and the longest sequence.
WIDE = [(n, n) for n in (32, 64, 72, 80, 96, 128, 136, 192, 256)]
WIDE += [(128, 64), (64, 128), (192, 128), (256, 64), (40, 72), (200, 8), (24, 40), (60, 60), (17, 33)]
#: In float32 a kernel rounds as seldom as the formula, whose error is its bound. Where dP and delta cancel, it has
#: the rounding of both sums of D_v products, and the formula may have none: they must be short. Also without a GPU.
NARROW = [(8, 8), (16, 16), (24, 40), (8, 40)]
#: Around tiles of 64, 80 and 128 rows.
EDGES = (1, 2, 16, 17, 63, 64, 65, 79, 81, 127, 128, 129, 255, 257, 385)
LAYOUTS = ("contiguous", "bshd", "transposed", "strided", "sliced", "halves", "expanded")
WINDOWS = (NO_WINDOW, NO_WINDOW, (5, 0), (9, -1), (-1, 9), (40, 3), (130, 70), (-1, 0), (300, -1))
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)

layouts = st.one_of(st.just("contiguous"), st.just("bshd"), st.sampled_from(LAYOUTS))


class Call(NamedTuple):
    """A case, and what stands beside its arguments: an additive mask's shape, or the dtype of sinks."""

    case: Case
    dtype: torch.dtype
    additive: tuple[int, ...] | None
    sinks: torch.dtype | None


class Sizes(NamedTuple):
    """The head dimensions and lengths that are drawn for a dtype."""

    dims: st.SearchStrategy[tuple[int, int]]
    queries: st.SearchStrategy[int]
    keys: st.SearchStrategy[int]

    @classmethod
    def of(cls, dtype: torch.dtype) -> Sizes:
        wide = ON_GPU and dtype != torch.float32
        longest_q, longest_k = (600, 600) if wide else (65, 140)
        edges = [n for n in EDGES if n <= longest_q]
        return cls(
            st.sampled_from(WIDE if wide else NARROW),
            st.one_of(st.sampled_from(edges), st.integers(1, longest_q)),
            st.one_of(st.sampled_from([n for n in edges if n > 8]), st.integers(8, longest_k)),
        )


SIZES = {dtype: Sizes.of(dtype) for dtype in DTYPES}


@st.composite
def options_of(draw, group: int) -> dict[str, Any]:
    return {
        "scale": draw(st.sampled_from([None, None, 0.07])),
        "enable_gqa": group > 1,
        "window_size": draw(st.sampled_from(WINDOWS)),
        "return_lse": draw(st.booleans()),
    }


@st.composite
def dense_calls(draw) -> Call:
    dtype, heads_kv, group = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    seqlen_q, seqlen_k, (d, d_v) = (draw(each) for each in (SIZES[dtype].queries, SIZES[dtype].keys, SIZES[dtype].dims))
    # A bound is the largest error of the formula's: of few rows, that is a matter of luck.
    batch, heads = draw(st.integers(1, 2)) if seqlen_q > 16 else draw(st.integers(4, 6)), heads_kv * group
    options = draw(options_of(group))
    options["is_causal"] = draw(st.sampled_from([False, True, LOWER_RIGHT]))
    shapes = ((batch, heads, seqlen_q, d), (batch, heads_kv, seqlen_k, d), (batch, heads_kv, seqlen_k, d_v))
    layout = tuple(draw(layouts) for _ in range(3))
    kinds, additive = {}, None
    what = draw(st.sampled_from(["no mask", "no mask", "boolean", "hidden_rows", "additive", "dropout"]))
    if what == "dropout":
        options |= {"dropout_p": draw(st.sampled_from([0.1, 0.5])), "seed": draw(st.integers(0, 2**63 - 1))}
    elif what != "no mask":
        broadcast, kept = draw(st.tuples(*[st.booleans()] * 4)), draw(st.integers(2, 4))
        scores = (batch, heads, seqlen_q, seqlen_k)
        mask = tuple(1 if one else n for one, n in zip(broadcast, scores, strict=True))[-kept:]
        if what == "additive":
            additive = mask
        else:
            shapes, kinds, layout = (*shapes, mask), {3: what}, (*layout, "contiguous")
    sinks = draw(st.sampled_from([None, None, None, torch.float32, dtype]))
    return Call(Case("", shapes, options, layout=layout, kinds=kinds), dtype, additive, sinks)


@st.composite
def packed_calls(draw) -> Call:
    dtype, heads_kv, group = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    sizes, sequences, square = SIZES[dtype], draw(st.integers(1, 5)), draw(st.booleans())
    d, d_v = draw(sizes.dims)
    of_q = [draw(st.one_of(st.just(0), sizes.queries, sizes.queries)) for _ in range(sequences)]
    of_k = of_q if square else [draw(st.one_of(st.just(0), sizes.keys, sizes.keys)) for _ in range(sequences)]
    hypothesis.assume(sum(of_q) >= 16 and sum(of_k) >= 8)
    places = [list(itertools.accumulate(lengths, initial=0)) for lengths in (of_q, of_k)]
    options = draw(options_of(group))
    options["is_causal"] = draw(st.sampled_from([False, True, LOWER_RIGHT]))
    told = draw(st.booleans())
    options |= {f"max_seqlen_{x}": max(n) if told else None for x, n in (("q", of_q), ("k", of_k))}
    rows = (sum(of_q), heads_kv * group, d), (sum(of_k), heads_kv, d), (sum(of_k), heads_kv, d_v)
    kinds = {place: "offsets:" + ",".join(map(str, of)) for place, of in zip((3, 4), places, strict=True)}
    layout = (*(draw(layouts.filter(lambda x: x != "expanded")) for _ in range(3)), "contiguous", "contiguous")
    shapes = (*rows, (sequences + 1,), (sequences + 1,))
    sinks = draw(st.sampled_from([None, None, None, torch.float32, dtype]))
    return Call(Case("", shapes, options, layout=layout, kinds=kinds), dtype, None, sinks)


def bands_of(call: Call) -> list[tuple[int, int, int, int]]:
    """(first, last, queries, keys) of each sequence."""
    case, options = call.case, call.case.options
    if 4 not in case.kinds:
        lengths = case.shapes[0][-2], case.shapes[1][-2]
        return [(*band(options["is_causal"], options["window_size"], *lengths), *lengths)]
    starts = [[int(n) for n in case.kinds[place].partition(":")[2].split(",")] for place in (3, 4)]
    of_each = [[b - a for a, b in itertools.pairwise(of)] for of in starts]
    causal = LOWER_RIGHT if options["is_causal"] else False
    return [(*band(causal, options["window_size"], *n), *n) for n in zip(*of_each, strict=True)]


def sees_few_keys(call: Call, inputs: Inputs, mask: torch.Tensor | None) -> bool:
    """Whether no query sees more than a few keys, and some see any.

    Where every query sees one key, the gradients of query and key vanish, and a sum in another order leaves an ulp.
    """
    most = 0
    for first, last, queries, keys in bands_of(call):
        visible = seen(first, last, queries, keys, DEVICE)
        if len(call.case.kinds) == 1:
            visible = visible & inputs[3]
        if mask is not None:
            visible = visible & (mask > -torch.inf)
        most = max(most, int(visible.sum(-1).max()) if visible.numel() else 0)
    return 0 < most < 6


def with_more(run: Callable[..., Output], mask: torch.Tensor | None, sinks: torch.Tensor | None, packed: bool):
    """`run` with a mask that asks for no gradient and sinks, as the public functions add them.

    A sink's gradient is one sum over all rows of a head: ``test_attention_sinks.py`` holds it.
    """

    def call(*inputs: torch.Tensor, return_lse: bool, **options: Any) -> Output:
        if mask is not None:
            inputs = (*inputs, mask.to(inputs[0]))
        if sinks is None:
            return run(*inputs, return_lse=return_lse, **options)
        output, lse = run(*inputs, return_lse=True, **options)
        return of_sinks.with_sinks(output, lse, sinks.to(lse.device), packed, return_lse)

    return call


def check(op: str, call: Call, level: str) -> int:
    """Hold every rung of a level that takes a call; return how many do."""
    case, packed = call.case, op == "attention_varlen"
    inputs = make_inputs(case, call.dtype, DEVICE)
    mask = sinks = None
    if call.additive is not None:
        (mask,) = make_inputs(Case("", (call.additive,)), call.dtype, DEVICE, seed=2)
        mask[..., ::5] = -torch.inf
    if call.sinks is not None:
        heads = case.shapes[0][-2 if packed else -3]
        (sinks,) = make_inputs(Case("", ((heads,),)), call.sinks, DEVICE, seed=3)
    asked = {**case.options, "return_lse": case.options["return_lse"] or sinks is not None}
    given = as_leaves(inputs) if mask is None else (*as_leaves(inputs), mask)
    takers = [v for v in table.variants(op, level) if v.unsupported(*given, **asked) is None]
    if not takers or sees_few_keys(call, inputs, mask):
        return 0
    spec = kernel_ladder.spec(op)
    # Without `parts`, which would compute each head on its own: these cases are small.
    formulas = {"reference": spec.reference, "oracle": spec.oracle, "yardstick": spec.yardstick}
    found = {name: None if f is None else with_more(f, mask, sinks, packed) for name, f in formulas.items()}
    spec = replace(spec, parts=None, **found)
    grad = make_grad(spec, inputs, case.options)
    to = standards(spec, inputs, case.options, grad)
    for variant in takers:
        run = with_more(lambda *x, variant=variant, **o: autograd.run(variant, x, o), mask, sinks, packed)
        result = agreement(spec, run, inputs, case.options, grad, to=to)
        assert result.agrees, (
            f"{variant.name} {call}: {case.shapes} {case.options} {case.kinds} {case.layout}: {result}"
        )
    return len(takers)


DRAWN = {"attention": dense_calls(), "attention_varlen": packed_calls()}


@pytest.mark.parametrize(
    ("op", "level", "chunk"),
    [
        pytest.param(
            op,
            level,
            chunk,
            id=f"{op}-{level}-{chunk}",
            marks=pytest.mark.slow if ON_GPU and level == "triton" else (),  # compiles for a minute
        )
        for op in DRAWN
        for level, (chunks, _) in SHARES.items()
        for chunk in range(chunks if ON_GPU else 1)
    ],
)
def test_random_calls(op, level, chunk, request):
    skip_unless_available(op, level)
    chunks, share = SHARES[level]
    asked_for = request.config.getoption("--random-calls") or CALLS
    examples = max(1, -(-asked_for // (share * chunks))) if ON_GPU else -(-asked_for // share)
    checked = 0

    @hypothesis.seed(chunk)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(call=DRAWN[op])
    def draw(call):
        nonlocal checked
        checked += check(op, call, level)

    draw()
    assert checked > 0, "no rung took any of the calls"
