"""Addition and sums: gradients without a copy, every regime against one another, the same bits every time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.semantics.reduction import broadcast_dims, gradients_of_broadcast, reduced_dims, spread, sum_shape
from kernel_ladder.spec import Case
from kernel_ladder.testing.deviation import compare
from kernel_ladder.testing.samples import make_inputs

from ..conftest import DEVICE, every_variant, needs_extension, needs_gpu, skip_unless_it_runs, variant_id

#: XLA writes every gradient: no view of a tensor enters or leaves its programs.
OWN_BACKWARD = [v for v in every_variant() if v.op in ("add", "sum") and v.backward is not None and v.level != "xla"]
shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


# ---- shapes ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(shape=shapes, data=st.data(), keepdim=st.booleans())
def test_shapes_of_sums_are_pytorchs(shape, data, keepdim):
    dims = data.draw(st.sets(st.integers(0, max(len(shape) - 1, 0)), max_size=len(shape)))
    signed = tuple(d - len(shape) if data.draw(st.booleans()) else d for d in dims)
    x = torch.zeros(shape, requires_grad=True)
    expected = torch.sum(x, signed, keepdim)
    found = reduced_dims(signed, len(shape))
    assert sum_shape(shape, found, keepdim) == expected.shape
    grad = torch.randn(expected.shape)
    assert torch.equal(spread(grad, shape, found, keepdim), torch.autograd.grad(expected, x, grad)[0])


@settings(deadline=None)
@given(shape=shapes, data=st.data())
def test_broadcast_dims_are_those_that_pytorch_sums_over(shape, data):
    other = tuple(data.draw(st.sampled_from((n, 1))) for n in shape)[data.draw(st.integers(0, len(shape))) :]
    x = torch.zeros(other, requires_grad=True)
    grad = torch.randn(shape)
    (expected,) = torch.autograd.grad(x.expand(shape), x, grad)
    dims = broadcast_dims(other, shape)
    torch.testing.assert_close(grad.sum(dims, True).reshape(other) if dims else grad.reshape(other), expected)


# ---- gradients -------------------------------------------------------------------------------------------------------


def _gradients(variant, case: Case, seed: int = 0):
    inputs = make_inputs(case, torch.float32, DEVICE, seed)
    skip_unless_it_runs(variant, inputs, case.options)
    leaves = tuple(x.requires_grad_() for x in inputs)
    output = autograd.run(variant, leaves, case.options)
    grad = torch.randn_like(output)
    return grad, torch.autograd.grad(output, leaves, grad)


@pytest.mark.parametrize("variant", OWN_BACKWARD, ids=variant_id)
def test_gradients_are_views_where_they_can_be(variant):
    if variant.op == "sum":
        cases = [Case("", ((5, 7),), {"dim": dim, "keepdim": False}) for dim in (None, 0, -1)]
    else:
        cases = [Case("", ((5, 7), (5, 7))), Case("", ((5, 7), (7,)))]
    for case in cases:
        grad, (of_input, *of_other) = _gradients(variant, case)
        assert of_input.data_ptr() == grad.data_ptr(), "no copy"
        for shape, x in zip(case.shapes[1:], of_other, strict=True):
            assert (x.data_ptr() == grad.data_ptr()) == (shape == grad.shape)
    leaf = torch.zeros(5, 7, device=DEVICE, requires_grad=True)
    for _ in range(2):  # what is accumulated is a tensor of its own, and not a view that repeats one element
        autograd.run(variant, (leaf,) * len(cases[0].shapes), cases[0].options).sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2.0 * len(cases[0].shapes)))


def test_gradients_that_are_views_inside_compile(scratch_table):
    """The path of the CUDA and Triton variants, on any machine."""

    def add(input, other):
        return torch.ops.aten.add(input, other), (input.shape, other.shape)

    def add_backward(saved, grad, needs):
        return gradients_of_broadcast(grad, saved, needs, torch.sum)

    def sum(input, *, dim, keepdim):
        dims = reduced_dims(dim, input.dim())
        return torch.ops.aten.sum(input, dims, keepdim), (input.shape, dims, keepdim)

    table.register("add", "torch.own", forward=add, backward=add_backward)
    table.register("sum", "torch.own", forward=sum, backward=lambda saved, grad, needs: (spread(grad, *saved),))

    def chain(backend, a, b, c):
        x = kernel_ladder.add(kernel_ladder.add(a, b, backend=backend), c, backend=backend)
        return kernel_ladder.sum(x, -1, backend=backend)

    leaves = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((5, 7), (5, 7), (7,))]
    inside = torch.compile(lambda *x: chain("torch.own", *x), fullgraph=True, backend="aot_eager")
    grad = torch.randn(5, device=DEVICE)
    found, expected = inside(*leaves), chain("torch.naive", *leaves)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad))


# ---- sums ------------------------------------------------------------------------------------------------------------


def _level_sums():
    """The last step of each level that has kernels of its own, and where it can be run."""
    return [table.variants("sum", level)[-1] for level in ("triton", "cuda") if table.variants("sum", level)]


@pytest.mark.parametrize("variant", _level_sums(), ids=variant_id)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_strides_and_dimensions(variant, data):
    shape = data.draw(st.lists(st.sampled_from((1, 2, 3, 8, 17)), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    steps = [data.draw(st.sampled_from((1, 1, 2))) for _ in shape]
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    memory = torch.randn([shape[d] * steps[d] for d in order], device=DEVICE)
    x = memory.permute([order.index(d) for d in range(len(shape))])[tuple(slice(None, None, s) for s in steps)]
    if data.draw(st.booleans()):
        x = x[:1].expand(shape)
    options = {"dim": tuple(dims), "keepdim": data.draw(st.booleans())}
    skip_unless_it_runs(variant, (x,), options)
    output = variant.forward(x, **options)[0]
    expected = x.double().sum(options["dim"], options["keepdim"])
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("variant", _level_sums(), ids=variant_id)
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_the_same_bits_every_time(variant, dim):
    x = make_inputs(Case("", ((1500, 1200),)), torch.float32, DEVICE)[0]
    options = {"dim": dim, "keepdim": False}
    skip_unless_it_runs(variant, (x,), options)
    first, again = (variant.forward(x, **options)[0] for _ in range(2))
    assert torch.equal(first, again)


# ---- on a GPU --------------------------------------------------------------------------------------------------------

#: Rows of 32768 that pass 2³¹ elements by one row.
HUGE = (2**16 + 1, 2**15)
#: Bytes of such a tensor of 16-bit elements, and what a test needs beside its tensors.
HUGE_BYTES, MORE = 2 * math.prod(HUGE), 1.2


@needs_gpu
@pytest.mark.parametrize("variant", [v for v in OWN_BACKWARD if v.op == "sum"], ids=variant_id)
@pytest.mark.parametrize("dim", [None, 0])
def test_a_sum_over_more_elements_than_a_32_bit_index_holds(variant, dim, gpu_memory):
    gpu_memory(1.2 * HUGE_BYTES * MORE)
    x = torch.ones(HUGE, dtype=torch.bfloat16, device="cuda")
    x[-1, ::2] = 7  # past the 2³¹st element
    options = {"dim": dim, "keepdim": False}
    skip_unless_it_runs(variant, (x,), options)
    output = variant.forward(x, **options)[0]
    of_column = torch.tensor([HUGE[0] + 6, HUGE[0]], dtype=torch.float64, device="cuda").repeat(HUGE[1] // 2)
    exact = of_column if dim == 0 else of_column.sum()
    assert compare("output", output, exact, None).agrees


@needs_gpu
@pytest.mark.parametrize("variant", [v for v in OWN_BACKWARD if v.op == "add"], ids=variant_id)
@pytest.mark.parametrize("other", [HUGE, HUGE[1:], (HUGE[0], 1)], ids=["equal", "row", "column"])
def test_an_addition_of_more_elements_than_a_32_bit_index_holds(variant, other, gpu_memory):
    gpu_memory(3.2 * HUGE_BYTES * MORE)
    a = torch.empty(HUGE, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty(other, dtype=torch.bfloat16, device="cuda").normal_()
    skip_unless_it_runs(variant, (a, b))
    output, saved = variant.forward(a, b)
    assert torch.equal(output, a + b)
    if other != HUGE:
        _, of_other = variant.backward(saved, a, (False, True))
        exact = torch.zeros(other, dtype=torch.float64, device="cuda")
        for rows in range(0, HUGE[0], 4096):
            part = a[rows : rows + 4096].double()
            if other == HUGE[1:]:
                exact += part.sum(0)
            else:
                exact[rows : rows + 4096] = part.sum(1, keepdim=True)
        assert compare("grad 1", of_other, exact, None).agrees


@needs_gpu
@needs_extension
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_regime_of_the_cuda_sum(dtype):
    """Shapes around each choice of the launch: threads a row, rows a block, one stage or two, vectors or not."""
    variant = table.variants("sum", "cuda")[-1]
    for count, length, offset in itertools.product((1, 3, 300, 1025), (1, 7, 8, 33, 1024, 4099, 70_001), (0, 1)):
        for dim, shape in ((-1, (count, length)), (0, (length, count))):
            x = torch.randn(count * length + offset, device=DEVICE).to(dtype)[offset:].view(shape)
            options = {"dim": dim, "keepdim": False}
            skip_unless_it_runs(variant, (x,), options)
            exact = x.double().sum(dim)
            deviation = compare("output", variant.forward(x, **options)[0], exact, None)
            assert deviation.agrees, f"{shape} dim={dim} offset={offset}: {deviation}"
