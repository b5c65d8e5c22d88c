"""The C++ operators as PyTorch sees them: schemas, fakes, and torch.library.opcheck on every overload."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cuda_impl
import kernel_ladder
from kernel_ladder import table
from kernel_ladder.semantics.float8 import FLOAT8, output_dtype
from kernel_ladder.spec import Case, as_leaves, as_tuple, each, has_gradient
from kernel_ladder.testing.samples import empty_inputs, make_inputs

from ..conftest import (
    DEVICE,
    elements,
    every_variant,
    needs_gpu,
    plain_cases,
    typical_case,
    variant_id,
    without_gradient,
)

BUILT = cuda_impl.extension() is not None
OVERLOADS = [
    f"{operator}.{name}"
    for operator, names in (cuda_impl.extension().variants() if BUILT else {}).items()
    for name in names
]

pytestmark = pytest.mark.skipif(not BUILT, reason="the extension kernel_ladder._C was not built")


class Recorder(TorchDispatchMode):
    """Notes every call of a kernel_ladder operator with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "kernel_ladder":
            name = func.name().removeprefix("kernel_ladder::")
            self.calls.setdefault(name, (func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


#: Calls of overloads that no sample calls.
MORE = {
    "attention": [
        Case(
            "",
            ((2, 4, 9, 16),) * 3,
            {"is_causal": True, "scale": None, "enable_gqa": False, "dropout_p": 0.3, "seed": 5},
        ),
        Case("", (*((2, 4, 9, 16),) * 3, (4, 1, 9)), {"is_causal": False, "scale": None, "enable_gqa": False}),
    ],
    "linear_cross_entropy": [  # two chunks
        Case(
            "",
            ((1030, 8), (9, 8), (1030,)),
            {
                "ignore_index": -100,
                "reduction": "mean",
                "label_smoothing": 0.0,
                "z_loss": 0.0,
                "wide_loss": False,
            },
            kinds={2: "classes@1"},
        ),
    ],
}


def run_both_passes(variant, inputs, options):
    output, saved = variant.forward(*inputs, **options)
    if variant.backward is None or without_gradient(variant):
        return output, ()
    grad = each(torch.ones_like, output) if isinstance(output, tuple) else torch.ones_like(output)
    return output, variant.backward(saved, grad, tuple(has_gradient(x) for x in inputs))


@functools.cache
def recorded() -> dict[str, tuple]:
    """One call of every overload, found by running every CUDA variant forward and backward on some samples."""
    recorder = Recorder()
    for variant in every_variant("cuda"):
        for case in (*sorted(plain_cases(variant.op), key=elements, reverse=True)[:12], *MORE.get(variant.op, ())):
            for dtype in (torch.bfloat16, torch.float32):
                inputs = make_inputs(case, dtype, DEVICE)
                forward_alone = variant.backward is None or without_gradient(variant)
                leaves = inputs if forward_alone else as_leaves(inputs)
                if variant.unsupported(*leaves, **case.options) is None:
                    with recorder, torch.no_grad():
                        run_both_passes(variant, inputs, case.options)
    return recorder.calls


@needs_gpu
@pytest.mark.parametrize("overload", OVERLOADS)
def test_opcheck(overload):
    assert overload in recorded(), "no variant calls this overload on the samples"
    func, args, kwargs = recorded()[overload]
    # Gradients are joined in Python (kernel_ladder.autograd), so autograd registration is none of the operator's.
    tests = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(x, torch.Tensor) and x.dtype is FLOAT8 for x in args):
        tests.remove("test_schema")  # which compares its arguments by operations that float8 does not have
    torch.library.opcheck(func, args, kwargs, test_utils=tests)


@needs_gpu
@pytest.mark.parametrize(
    ("overload", "arguments", "message"),
    [
        ("softmax.shared", lambda x: (x, 7), "argument `dim` is out of range"),
        ("softmax_backward.naive", lambda x: (x, x[:1], 0), "argument `output` must have the shape of"),
        ("gelu_backward.vectorized", lambda x: (x, x.double(), "none"), "argument `input` must have the dtype of"),
        ("matmul.mma", lambda x: (x, x.cpu(), False), "argument `other` must be a CUDA tensor"),
        ("attention.flash", lambda x: (x, x, x, None, -4, 4, 1.0, False), "must have at least 3 dimensions"),
        (
            "attention.flash",
            lambda x: (x[None], x[None], x[None], x[:3], -4, 4, 1.0, False),
            "argument `attn_mask` must have the shape of the scores",
        ),
        (
            "attention_mask_backward.naive",
            lambda x: (x[None], None, x[None], x[None], x[None], x[:3], -4, 4, 1.0, False),
            "argument `attn_mask` must broadcast to the shape of the scores",
        ),
        ("add.vectorized", lambda x: (x, x[:, :3]), "sizes 4 and 3 do not broadcast"),
        ("sum.two_stage", lambda x: (x, [0, 2], False), "argument `dim` must hold each dimension once"),
        ("sum.naive", lambda x: (x, [1, 1], False), "argument `dim` must hold each dimension once"),
    ],
)
def test_operators_check_what_protects_memory(overload, arguments, message):
    """Whoever calls an operator directly passes by the checks of the public functions."""
    operator, _, name = overload.partition(".")
    with pytest.raises(RuntimeError, match=message):
        getattr(getattr(torch.ops.kernel_ladder, operator), name)(*arguments(torch.randn(4, 4, device="cuda")))


@pytest.mark.parametrize("overload", OVERLOADS)
def test_every_overload_has_a_fake_and_a_cuda_kernel(overload):
    for op in kernel_ladder.OPS:
        table.variants(op, "cuda")
    name = f"kernel_ladder::{overload}"
    # A name given without ".default" is an overload's own; registrations are kept under it.
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    assert torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


def test_the_schema_table_is_the_list_of_variants():
    known = cuda_impl.extension().variants()
    for op in kernel_ladder.OPS:
        names = [v.name.removeprefix("cuda.") for v in table.variants(op, "cuda")]
        assert names == known.get(op, []), f"{op}: the climb in csrc/core/bindings.cpp is registered in another order"


@pytest.mark.parametrize("overload", OVERLOADS)
def test_schemas_are_functional(overload):
    operator, _, name = overload.partition(".")
    schema = getattr(getattr(torch.ops.kernel_ladder, operator), name)._schema
    # A chunk's operators write to views of what the call allocates, and return nothing.
    assert schema.is_mutable == (not schema.returns) == operator.startswith("linear_cross_entropy")
    first = schema.arguments[0].type
    assert str(first) == "Tensor"


#: Tensors, and the strides of a result like each: dense, in the tensor's memory order, or of an expanded one row-major.
LAYOUTS = {
    "row-major": (lambda device: torch.empty(2, 3, 4, device=device), (12, 4, 1)),
    "permuted": (lambda device: torch.empty(2, 3, 4, device=device).permute(2, 0, 1), (1, 12, 4)),
    "sliced": (lambda device: torch.empty(2, 3, 8, device=device)[..., :4], (12, 4, 1)),
    "permuted and sliced": (
        lambda device: torch.empty(2, 5, 3, 24, device=device)[..., :8].transpose(1, 2),
        (120, 8, 24, 1),
    ),
    "expanded": (lambda device: torch.empty(1, 4, device=device).expand(3, 4), (4, 1)),
}


@pytest.mark.parametrize(("make", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_fake_has_the_strides_that_the_operators_allocate(make, expected):
    x = make("cpu")
    assert cuda_impl.fake_like(x).stride() == expected
    with FakeTensorMode():
        assert cuda_impl.fake_like(make("cpu")).stride() == expected


@needs_gpu
@pytest.mark.parametrize("op", ["gelu", "softmax", "dropout", "swiglu", "layer_norm", "rms_norm", "add_rms_norm"])
@pytest.mark.parametrize(("make", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_operators_allocate_what_their_fakes_say(op, make, expected):
    x = make("cuda").normal_() if expected != (4, 1) else torch.randn(1, 4, device="cuda").expand(3, 4)
    options = {
        "gelu": {"approximate": "none"},
        "softmax": {"dim": -1},
        "dropout": {"p": 0.5, "seed": 0},
        "layer_norm": {"normalized_shape": x.shape[-1:]},
        "rms_norm": {"normalized_shape": x.shape[-1:]},
    }.get(op, {})
    inputs = (x, x) if op in ("swiglu", "add_rms_norm") else (x,)
    for output in as_tuple(getattr(kernel_ladder, op)(*inputs, **options, backend="cuda")):
        assert output.stride() == cuda_impl.fake_like(x).stride()


@pytest.mark.parametrize("variant", every_variant("cuda"), ids=variant_id)
def test_fakes_give_the_shape_and_dtype_of_the_real_result(variant):
    """Without data and without a GPU: the fakes alone, forward and backward."""
    spec, case = kernel_ladder.spec(variant.op), typical_case(variant.op)
    shapes = spec.output_shapes(make_inputs(case, torch.float32, "cpu"), case.options)
    with FakeTensorMode():
        inputs = empty_inputs(case, torch.bfloat16, "cuda")
        output, grads = run_both_passes(variant, inputs, case.options)
    dtype = output_dtype(case.options.get("out_dtype", torch.bfloat16))
    for made, shape in zip(as_tuple(output), shapes, strict=True):
        assert (made.shape, made.dtype, made.device.type) == (shape, dtype, "cuda")
    assert not grads or [g.shape for g in grads if g is not None] == [x.shape for x in inputs if has_gradient(x)]
