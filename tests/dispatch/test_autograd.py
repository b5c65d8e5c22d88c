"""What autograd does with a variant's results: gradients of any strides, and outputs that are modified in place."""

from __future__ import annotations

import re

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, selection, table
from kernel_ladder.spec import as_leaves, as_tuple, has_gradient
from kernel_ladder.testing.agreement import evaluate
from kernel_ladder.testing.samples import make_inputs

from ..conftest import (
    DEVICE,
    every_variant,
    plain_cases,
    skip_unless_available,
    skip_unless_it_runs,
    typical_case,
    variant_id,
)

X = (2, 4, 2, 2, 3, 3)
#: Calls on six dimensions, by the shapes of their operands.
CALLS = {
    "gelu": ((X,), {}),
    "dropout": ((X,), {"p": 0.3, "seed": 5}),
    "softmax": ((X,), {"dim": -1}),
    "softmax-middle": ((X,), {"dim": 2}),
    "swiglu": ((X, X), {}),
    "bias_gelu": ((X, (3,)), {}),
    "add": ((X, (3,)), {}),
    "add-number": ((X, ()), {}),
    "sum": ((X,), {"dim": 5, "keepdim": True}),
    "layer_norm": ((X, (3,), (3,)), {"normalized_shape": (3,)}),
    "rms_norm": ((X, (3,)), {"normalized_shape": (3,)}),
    "linear": ((X, (3, 3), (3,)), {"activation": "gelu"}),
}
#: What makes gradients of strides that do not collapse.
USES = {
    "patches": lambda y: y.permute(0, 1, 4, 2, 5, 3).reshape(2, -1).square(),
    "sums": lambda y: y.sum((0, 2, 4)).square(),
    "slices": lambda y: y * torch.ones([2 * n for n in y.shape], device=y.device)[(slice(None, None, 2),) * y.dim()],
    "reversed": lambda y: y.permute(5, 4, 3, 2, 1, 0) * 3,
}


@pytest.mark.parametrize("level", ["cuda", "triton"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("call", CALLS)
def test_a_gradient_may_have_any_strides(call, use, level):
    op = call.partition("-")[0]
    skip_unless_available(op, level)
    shapes, options = CALLS[call]
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = tuple(torch.randn(shape, generator=generator, device=DEVICE) for shape in shapes)

    def run(backend: str) -> dict[str, torch.Tensor]:
        def used(*leaves: torch.Tensor) -> torch.Tensor:
            names = kernel_ladder.spec(op).named(leaves)
            return USES[use](getattr(kernel_ladder, op)(**names, **options, backend=backend)).sum()

        return evaluate(used, inputs, {}, torch.ones((), device=DEVICE))

    torch.testing.assert_close(run(level), run("torch.naive"), rtol=1e-4, atol=1e-3)


#: Beside each operation's typical sample, shapes that a variant may have to view its operands in another shape for.
OTHER_SHAPES = {
    "attention": ("3d", "5d-causal", "lse-3d"),
    "attention_varlen": ("lse-causal",),
    "layer_norm": ("two-dims", "4d"),
    "rms_norm": ("two-dims", "4d"),
    "add_rms_norm": ("4d",),
    "bias_dropout_add_layer_norm": ("4d",),
    "linear": ("3d",),
}
#: Of which an output is kept for the backward pass.
KEPT = ("softmax", "attention", "attention_varlen", "add_rms_norm")


def outputs_to_modify():
    for variant in every_variant():
        if variant.level != "compile":
            others = [c for c in plain_cases(variant.op) if c.id in OTHER_SHAPES.get(variant.op, ())]
            for case in (typical_case(variant.op, 3000), *others):
                yield pytest.param(variant, case, id=f"{variant_id(variant)}-{case.id}")


@pytest.mark.sampled
@pytest.mark.parametrize(("variant", "case"), list(outputs_to_modify()))
def test_outputs_may_be_modified_in_place(variant, case):
    inputs = make_inputs(case, torch.float16 if DEVICE.type == "cuda" else torch.float32, DEVICE)
    leaves = as_leaves(inputs)
    skip_unless_it_runs(variant, leaves, case.options)

    def gradients(in_place: bool) -> tuple[torch.Tensor, ...]:
        outputs = as_tuple(autograd.run(variant, leaves, case.options))
        outputs = tuple(x.mul_(2) if in_place else x * 2 for x in outputs)
        wanted = [x for x in leaves if has_gradient(x)]
        return torch.autograd.grad(outputs, wanted, tuple(map(torch.ones_like, outputs)))

    try:
        found = gradients(True)  # before the other: a first call allocates its output by other code than later ones
    except RuntimeError as error:
        # The backward pass alone may object, to what it needs.
        if variant.op not in KEPT or "modified by an inplace operation" not in str(error):
            raise
    else:
        torch.testing.assert_close(found, gradients(False), rtol=0, atol=0)


def to_differentiate_again() -> list[table.Variant]:
    """All rungs. Without a GPU, one stands for the compilers: its backward pass keeps results of its forward pass."""
    if DEVICE.type == "cuda":
        return every_variant()
    of_compilers = [v for v in table.variants("linear_cross_entropy", "compile") if v.name == "compile.default"]
    return [*every_variant("torch", "triton", "cuda"), *of_compilers]


@pytest.mark.sampled(device="cuda")
@pytest.mark.parametrize("variant", to_differentiate_again(), ids=variant_id)
def test_a_graph_that_is_retained_is_differentiated_again(variant):
    """Also where the backward pass was compiled for a graph that was not retained."""
    case = typical_case(variant.op, 500)
    leaves = as_leaves(make_inputs(case, torch.float16 if DEVICE.type == "cuda" else torch.float32, DEVICE))
    skip_unless_it_runs(variant, leaves, case.options)
    outputs = as_tuple(autograd.run(variant, leaves, case.options))
    wanted = [x for x in leaves if has_gradient(x)]
    grads = [torch.rand_like(x) for x in outputs]
    if variant.level == "compile":
        torch.autograd.grad(outputs, wanted, grads)
        outputs = as_tuple(autograd.run(variant, leaves, case.options))
    first = torch.autograd.grad(outputs, wanted, grads, retain_graph=True)
    again = torch.autograd.grad(outputs, wanted, [2 * x for x in grads])
    torch.testing.assert_close(again, tuple(2 * x for x in first), rtol=1e-2, atol=1e-3)


def test_what_is_compiled_again_has_the_same_gradients():
    """torch._dynamo.reset() forgets compiled code, as a change of a global setting does."""
    skip_unless_available("linear_cross_entropy", "compile")
    case = typical_case("linear_cross_entropy", 500)
    leaves = as_leaves(make_inputs(case, torch.float32, DEVICE))
    found = []
    for _ in range(2):
        outputs = as_tuple(kernel_ladder.linear_cross_entropy(*leaves, **case.options, backend="compile.default"))
        wanted = [x for x in leaves if has_gradient(x)]
        grads = [torch.ones_like(x) for x in outputs]
        found += [torch.autograd.grad(outputs, wanted, grads, retain_graph=True) for _ in range(2)]
        torch._dynamo.reset()
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@pytest.mark.parametrize("said", ["could not allocate the output", "Triton Error [CUDA]: out of memory"])
@pytest.mark.parametrize("pass_", ["forward", "backward", "backward of a graph"])
def test_memory_that_is_short_is_pytorchs_own_error(monkeypatch, pass_, said):
    def full(*args, **kwargs):
        raise RuntimeError(said)

    short = table.Variant(
        "gelu",
        "torch.short",
        forward=full if pass_ == "forward" else lambda x, **options: (x.clone(), (x,)),
        backward=full,
        unsupported=lambda *inputs, **options: None,
    )
    monkeypatch.setattr(selection, "choose", lambda *args: short)
    x = torch.ones(3, requires_grad=True)

    def call() -> None:
        torch.autograd.grad(kernel_ladder.gelu(x).sum(), x, create_graph=pass_ == "backward of a graph")

    with pytest.raises(torch.OutOfMemoryError, match=re.escape(said)):
        call()
