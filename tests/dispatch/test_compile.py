"""Every backend inside ``torch.compile(fullgraph=True)``, forward and backward; and a change of backend is seen."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

import kernel_ladder
from kernel_ladder import nn, table
from kernel_ladder.spec import Case, each
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import (
    DEVICE,
    every_variant,
    needs_gpu,
    public,
    register_own_gelu,
    skip_unless_available,
    skip_unless_it_runs,
    typical_case,
    variant_id,
    without_gradient,
)

#: Inductor on the CPU takes tens of seconds a graph and would test Inductor; tracing and differentiation are the same.
OUTER = "inductor" if DEVICE.type == "cuda" else "aot_eager"


pytestmark = pytest.mark.usefixtures("forget_compiled")


def calls():
    """Every rung in both passes; without a GPU the backward pass, which compares outputs too."""
    for variant, backward in itertools.product(every_variant(), (False, True)):
        if backward or DEVICE.type == "cuda":
            yield pytest.param(variant, backward, id=f"{variant_id(variant)}-{'backward' if backward else 'forward'}")


def unchanged(x: torch.Tensor) -> torch.Tensor:
    """A copy, by an operator that a compiler fuses with its neighbours. Float8 has no products of its own."""
    return x.clone() if x.dtype is torch.float8_e4m3fn else x * 1


@pytest.mark.sampled
@pytest.mark.parametrize(("variant", "backward"), list(calls()))
def test_inside_compile(variant, backward):
    spec, case = kernel_ladder.spec(variant.op), typical_case(variant.op, most=20_000)
    inputs = make_inputs(case, torch.float32, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    backward = backward and not without_gradient(variant)

    @torch.compile(fullgraph=True, backend=OUTER)
    def inside(*inputs):
        # The neighbours on both sides make it part of a larger graph.
        output = public(variant.op, each(unchanged, inputs), case.options, backend=variant.name)
        return each(lambda x: x * 1, output) if isinstance(output, tuple) else output * 1

    grad = None
    if backward:
        grad = make_grad(spec, inputs, case.options)
    result = agreement(spec, lambda *x, **options: inside(*x), inputs, case.options, grad)
    assert result.agrees, str(result)


def ops_and_backends():
    """Without a GPU the default and `auto` are PyTorch's own function: a few operations stand for all."""
    for number, op in enumerate(kernel_ladder.OPS):
        for backend in (None, "auto", "torch"):
            if backend == "torch" or DEVICE.type == "cuda" or number % 4 == 0:
                yield op, backend


@pytest.mark.parametrize(("op", "backend"), list(ops_and_backends()))
def test_levels_and_default_inside_compile(op, backend):
    case = typical_case(op, most=20_000)
    inputs = make_inputs(case, torch.float32, DEVICE)
    inside = torch.compile(lambda *x: public(op, x, case.options, backend=backend), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(inside(*inputs), public(op, inputs, case.options, backend=backend))


@pytest.mark.parametrize("op", kernel_ladder.OPS)
def test_dynamic_shapes_inside_compile(op):
    """Then torch.compile traces floats as symbols too, such as an `eps`."""
    case = typical_case(op, most=20_000)
    inputs = make_inputs(case, torch.float32, DEVICE)
    inside = torch.compile(
        lambda *x: public(op, x, case.options, backend="torch"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    torch.testing.assert_close(inside(*inputs), public(op, inputs, case.options, backend="torch"))


@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
def test_a_float_that_changes_or_follows_from_a_shape_inside_compile(dynamic):
    def scaled(x, eps):
        x = kernel_ladder.layer_norm(x, x.shape[-1:], eps=eps)
        return kernel_ladder.attention(x, x, x, scale=x.shape[-1] ** -0.5, backend="torch.naive")

    inside = torch.compile(scaled, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for width, eps in ((8, 1e-5), (16, 1e-5), (24, 0.1), (24, 0.3)):
        x = torch.randn(1, 2, 5, width, device=DEVICE)
        torch.testing.assert_close(inside(x, eps), scaled(x, eps))


@pytest.mark.parametrize("window", [(-1, -1), (3, -1)], ids=["causal", "window"])
@pytest.mark.parametrize("backend", ["torch", "auto", "compile", "triton"])
def test_lower_right_of_unequal_lengths_inside_compile(backend, window):
    """PyTorch's object for this mask is none that a graph can hold."""
    if backend != "auto":
        skip_unless_available("attention", backend)
    options = {"is_causal": "lower_right", "enable_gqa": True, "window_size": window}
    spec, case = kernel_ladder.spec("attention"), Case("", ((1, 4, 4, 16), (1, 2, 9, 16), (1, 2, 9, 16)), options)
    inputs = make_inputs(case, torch.float32, DEVICE)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(*inputs):
        return kernel_ladder.attention(*inputs, **options, backend=backend)

    result = agreement(spec, lambda *x, **_: inside(*x), inputs, options, make_grad(spec, inputs, options))
    assert result.agrees, str(result)


@needs_gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str)
@pytest.mark.parametrize("backend", ["auto", "cuda", "triton"])
def test_head_dimensions_of_models_inside_compile(backend, dims):
    """At lengths at which `auto` takes a rung of its own for each."""
    skip_unless_available("attention", "cuda" if backend == "auto" else backend)
    (d, d_v), options = dims, {"is_causal": True}
    spec = kernel_ladder.spec("attention")
    inputs = make_inputs(Case("", ((1, 4, 2048, d), (1, 4, 2048, d), (1, 4, 2048, d_v))), torch.bfloat16, DEVICE)
    inside = torch.compile(lambda *x: kernel_ladder.attention(*x, **options, backend=backend), fullgraph=True)
    result = agreement(spec, lambda *x, **_: inside(*x), inputs, options, make_grad(spec, inputs, options))
    assert result.agrees, str(result)


def test_compile_default_takes_a_key_value_cache(monkeypatch):
    """Two tokens after three: fewer queries than keys, under a causal mask. Inductor adds seconds and nothing else."""
    skip_unless_available("attention", "compile")
    monkeypatch.setattr("compile_impl._Inductor", lambda *_: "aot_eager")
    layer = nn.GroupedQueryAttention(16, 2, backend="torch", device=DEVICE)
    x = torch.randn(1, 5, 16, device=DEVICE)
    cache = layer.new_cache(1, 5)
    with torch.no_grad():
        expected = layer(x)[:, 3:]
        layer(x[:, :3], cache)
        layer.backend = "compile.default"
        torch.testing.assert_close(layer(x[:, 3:], cache), expected)


@pytest.mark.parametrize(
    ("before", "call"),
    [
        ("", "kl.gelu(x)"),
        ("", "kl.gelu(x, backend='compile')"),
        ("kl.softmax(x, -1)", "kl.gelu(x)"),
        ("", "chosen(x)"),
    ],
    ids=["default", "level", "after-another", "use"],
)
def test_the_first_call_of_a_process_inside_compile(before, call):
    """torch.compile begins to trace while no operation is loaded, or another alone."""
    code = f"""
import torch, kernel_ladder as kl
x = torch.randn(9)
{before}

def chosen(x):
    with kl.use("torch.naive"):
        return kl.gelu(x)

compiled = torch.compile(lambda x: {call}, fullgraph=True, backend="aot_eager")
for _ in range(2):
    torch.testing.assert_close(compiled(x), torch.nn.functional.gelu(x))
assert getattr(kl.table._chosen, "backend", None) is None
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def _adds(amount: float):
    return lambda input, **options: (input + amount, ())


@pytest.fixture
def telltale(scratch_table, monkeypatch):
    """A compiled call of gelu without a backend, whose result tells which variant ran."""
    monkeypatch.delenv(table.ENV_BACKEND, raising=False)
    table.register("gelu", "torch.one", forward=_adds(1))
    table.register("gelu", "torch.two", forward=_adds(2))
    compiled = torch.compile(lambda x: kernel_ladder.gelu(x), fullgraph=True, backend="eager")
    return lambda: compiled(torch.zeros(1, device=DEVICE)).item()


def test_use_between_calls_of_one_compiled_function(telltale):
    assert telltale() == 0, "auto"
    for _ in range(2):
        with kernel_ladder.use("torch.one"):
            assert telltale() == 1
            with kernel_ladder.use("torch.two"):
                assert telltale() == 2
            assert telltale() == 1
        assert telltale() == 0


def test_the_environment_between_calls_of_one_compiled_function(telltale, monkeypatch):
    assert telltale() == 0
    for name, result in [("torch.one", 1), ("torch.two", 2), ("torch.one", 1)]:
        monkeypatch.setenv(table.ENV_BACKEND, name)
        assert telltale() == result
    monkeypatch.delenv(table.ENV_BACKEND)
    assert telltale() == 0


def test_use_inside_the_compiled_function(scratch_table):
    table.register("gelu", "torch.one", forward=_adds(1))
    with kernel_ladder.use("torch.one"):
        compiled = torch.compile(lambda x: kernel_ladder.gelu(x, backend=None) * 2, fullgraph=True, backend="eager")
        assert compiled(torch.zeros(1, device=DEVICE)).item() == 2


def test_a_backward_of_its_own_inside_compile(scratch_table):
    """The path of the CUDA and Triton variants, on any machine: forward and backward as plain functions."""
    register_own_gelu()
    inside = torch.compile(lambda x: kernel_ladder.gelu(x * 2, backend="torch.own"), fullgraph=True, backend=OUTER)
    x = torch.randn(33, device=DEVICE, requires_grad=True)
    y = torch.nn.functional.gelu(x * 2)
    torch.testing.assert_close(inside(x), y)
    (expected,) = torch.autograd.grad(y.sum(), x)
    (actual,) = torch.autograd.grad(inside(x).sum(), x)
    torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        torch.testing.assert_close(inside(x), y)


def test_errors_keep_their_words_inside_compile():
    inside = torch.compile(lambda x: kernel_ladder.gelu(x, backend="tritn"), backend="eager")
    with pytest.raises(Exception, match="did you mean 'triton'"):
        inside(torch.zeros(2, device=DEVICE))
