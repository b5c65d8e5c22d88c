"""What torch.compile's operators carry as text, and what they do with memory that a rung shares."""

from __future__ import annotations

import base64
import contextlib
import functools
import gc
import os
import pickle
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_ladder
from kernel_ladder import autograd, operators, packing, table
from kernel_ladder.semantics.norms import check_eps
from kernel_ladder.spec import as_leaves, as_tuple, has_gradient
from kernel_ladder.testing.samples import make_inputs
from kernel_ladder.tracing import address, inferring_shapes, shapes_only
from triton_impl.norm.common import Kind

from ..conftest import DEVICE, elements, every_variant, plain_cases, skip_unless_it_runs, variant_id, without_gradient
from ..conftest import public as public_function


def test_values_come_back_as_they_were():
    values = (None, True, 1.5, float("inf"), "a", ..., (1, (2,)), torch.bfloat16, torch.device("cuda", 0))
    values += (torch.Size([1, 2]), packing.SequenceOf(tuple, (1,)), packing.TensorPlace(1, None))
    assert packing.decoded(packing.encoded(values)) == values


@pytest.mark.parametrize("harmful", [os.system, eval, torch.load, check_eps], ids=lambda f: f.__name__)
def test_text_from_elsewhere_names_no_function(harmful):
    text = base64.b64encode(pickle.dumps(harmful)).decode()
    with pytest.raises(pickle.UnpicklingError, match="cannot hold"):
        packing.decoded(text)


def test_saved_values_are_put_together_again():
    x, y = torch.arange(12.0).view(3, 4), torch.arange(4.0)
    own = torch.ones(2)
    seen = torch.tensor([True, False, True])
    saved = (x, x[1:, ::2], y.view(2, 2), own, own[:1], None, "none", Kind(True, False), torch.Size([3, 4]), 2.5, 7)
    saved = (*saved, seen.view(torch.uint8), own)
    taken = packing.taken_apart((x, None, seen), (y,), saved)
    assert taken.kept == ((0, 1), (0,))
    assert [t.data_ptr() for t in taken.own] == [t.data_ptr() for t in packing.own_tensors(saved, (x, seen, y))]
    assert [t.shape for t in taken.own] == [own.shape]
    tensors, integers = [x, seen, y, *taken.own], iter(taken.integers)
    back = [packing.restored(value, tensors, integers) for value in packing.decoded(taken.text)]
    for found, expected in zip(back, saved, strict=True):
        if isinstance(expected, torch.Tensor):
            assert found.data_ptr() == expected.data_ptr()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        else:
            assert found == expected
            assert type(found) is type(expected)


@pytest.mark.sampled
@pytest.mark.parametrize("variant", [v for v in every_variant() if v.backward is not None], ids=variant_id)
def test_shapes_are_those_of_a_launch(variant):
    """Host code that only allocates gives results, saved values and gradients laid out as a launch does."""
    for case in sorted(plain_cases(variant.op), key=elements)[:6]:
        inputs = inputs_of(case)
        skip_unless_it_runs(variant, inputs, case.options)
        output, saved = variant.forward(*inputs, **case.options)
        with inferring_shapes():
            assert shapes_only()
            of_shapes, saved_shapes = variant.forward(*inputs, **case.options)
        assert described(of_shapes) == described(output), case
        assert described(saved_shapes) == described(saved), case
        if without_gradient(variant):
            continue
        grads = tuple(torch.ones_like(x) for x in as_tuple(output))
        grad = grads if len(grads) > 1 else grads[0]
        needs = tuple(x is not None and x.is_floating_point() for x in inputs)
        gradients = variant.backward(saved, grad, needs)
        with inferring_shapes():
            found = variant.backward(saved, grad, needs)
        assert described(found) == described(gradients), case
    assert not shapes_only()


@pytest.fixture
def without_collector():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sampled
@pytest.mark.parametrize("variant", every_variant(), ids=variant_id)
def test_memory_waits_for_no_garbage_collector(variant, without_collector):
    """A reference cycle that holds a result keeps its memory until Python's collector runs, which is seldom."""
    case = min(plain_cases(variant.op), key=elements)
    inputs = inputs_of(case)
    skip_unless_it_runs(variant, inputs, case.options)
    saves = variant.backward is not None and not without_gradient(variant)

    def by_operators() -> list[torch.Tensor]:
        """What a compiled program's forward and backward pass make."""
        name, options, integers = (variant.op, variant.name), *operators_options(case.options)
        with operators._asking():
            found = torch.ops.kernel_ladder.forward(*name, inputs, options, integers, saves)
            saved = operators._last.saved
        if not saves:
            return found
        outputs = found[: len(found) - len(saved.own)]
        given = [x for x in inputs if x is not None]
        kept = [given[i] for i in saved.kept[0]] + [outputs[i] for i in saved.kept[1]] + saved.own
        grads, needs = [torch.ones_like(x) for x in outputs], [has_gradient(x) for x in inputs]
        operators._last.saved = None
        found += torch.ops.kernel_ladder.backward(*name, grads, kept, saved.text, saved.integers, needs)
        return found

    def by_autograd() -> list[torch.Tensor]:
        leaves = as_leaves(inputs) if saves else inputs
        outputs = as_tuple(autograd.run(variant, leaves, {**case.options}))
        if saves:
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        return [*outputs, *(x.grad for x in leaves if x is not None and x.grad is not None)]

    for run in (by_operators, by_autograd):
        made = [weakref.ref(x) for x in run()]
        assert made
        alive = [x for x in (each() for each in made) if x is not None and not any(x is y for y in inputs)]
        assert not alive, f"{run.__name__}: {[x.shape for x in alive]}"


def operators_options(options):
    integers = []
    template = tuple((name, packing.without_integers(value, integers)) for name, value in options.items())
    return packing.encoded(template), integers


def inputs_of(case):
    return make_inputs(case, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32, DEVICE)


def described(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(described(v) for v in value)
    return value


def test_an_address_without_data_is_a_place_in_the_storage():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(64, dtype=torch.bfloat16)
        assert address(x[3:]) == 6
    assert address(torch.empty(8)) % 16 == 0


@pytest.mark.parametrize("op", ["add", "sum"])
def test_results_share_no_memory_with_arguments(op):
    """A gradient that is another's view leaves the operators as that view, not as a second result in its memory."""
    x = torch.randn(5, 7, device=DEVICE, requires_grad=True)
    options = {} if op == "add" else {"dim": (1,), "keepdim": False}
    for variant in table.variants(op):
        if variant.backward is None or table.unavailable(op, variant.level):
            continue
        function = torch.compile(
            lambda *x, v=variant: public_function(op, x, options, backend=v.name), backend="aot_eager"
        )
        y = function(x, x * 2) if op == "add" else function(x)
        (found,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(found, torch.full_like(x, 3.0 if op == "add" else 1.0))


def test_a_variant_gets_operands_that_begin_where_it_takes_them(monkeypatch):
    """Addresses are known after the choice alone: one compiled program is called with operands from anywhere."""

    def unsupported(*inputs, **options):
        return None if all(address(x) % 16 == 0 for x in inputs) else "TMA reads rows that start on 16 bytes"

    def forward(input, other):
        assert unsupported(input, other) is None
        return input * other, (input, other)

    def backward(saved, grad, needs):
        input, other = saved
        assert unsupported(input, other) is None
        return grad * other, grad * input

    # A product, because its gradient needs both operands.
    needs_it = table.Variant("add", "torch.tma", forward=forward, backward=backward, unsupported=unsupported)
    monkeypatch.setitem(table._variants["add", "torch"], "torch.tma", needs_it)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x, y):
        return kernel_ladder.add(x, y, backend="torch.tma")

    x, y = (torch.arange(1.0, 101.0, device=DEVICE) for _ in range(2))
    for first in (0, 1, 3, 4):
        a = x[first : first + 32].view(4, 8).requires_grad_()
        for b in (y[first : first + 32].view(4, 8), y[first : first + 8].expand(4, 8)):
            found = compiled(a, b)
            torch.testing.assert_close(found, a * b)
            torch.testing.assert_close(*torch.autograd.grad(found.sum(), a), b)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("level", ["torch", "triton", "cuda"])
def test_an_exported_program_takes_any_number_of_rows(level, strict):
    for op in ("gelu", "rms_norm"):
        if (reason := table.unavailable(op, level)) is not None:
            pytest.skip(reason)

    class Norm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(24, device=DEVICE))

        def forward(self, x):
            return kernel_ladder.gelu(kernel_ladder.rms_norm(x, (24,), self.weight, backend=level), backend=level)

    module, rows = Norm(), torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(
        module, (torch.randn(3, 24, device=DEVICE),), dynamic_shapes={"x": {0: rows}}, strict=strict
    )
    x = torch.randn(7, 24, device=DEVICE)
    torch.testing.assert_close(exported.module()(x), module(x))


@pytest.mark.parametrize("without_data", [False, True])
def test_a_gradient_in_a_graph_refuses_to_be_differentiated(without_data):
    with FakeTensorMode() if without_data else contextlib.nullcontext():
        x, grad = torch.ones(3), torch.ones(3, requires_grad=True)
        backward = functools.partial(torch.ops.kernel_ladder.backward, "gelu", "triton.fused")
        with pytest.raises(RuntimeError, match=r"gelu: triton\.fused can be differentiated only once"):
            backward([grad], [x], "", [], [True])
