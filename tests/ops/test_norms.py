"""What the normalisations promise beyond their samples: eps, gradients on demand, many rows, the same bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_ladder
from cuda_impl import built_for
from kernel_ladder import autograd
from kernel_ladder.spec import Case, as_leaves, as_tuple
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_grad, make_inputs
from triton_impl.bias_dropout_add_layer_norm import cluster

from ..conftest import DEVICE, every_variant, needs_extension, needs_gpu, skip_unless_it_runs, variant_id

OPS = ("layer_norm", "rms_norm", "add_rms_norm", "bias_dropout_add_layer_norm")
NORMS = [v for v in every_variant() if v.op in OPS]
#: XLA makes each set of gradients by a program of its own.
OWN_BACKWARD = [v for v in NORMS if v.backward is not None and v.level != "xla"]
PERSISTENT = [v for v in NORMS if v.name == "triton.persistent_cluster"]


def grad_if_taken(variant, inputs, options):
    """The output's gradient, or None where the rung takes these inputs only without one. Skips where neither."""
    skip_unless_it_runs(variant, inputs, options)
    if variant.unsupported(*as_leaves(inputs), **options) is not None:
        return None
    return make_grad(kernel_ladder.spec(variant.op), inputs, options)


def case_of(op: str, *shape: int, eps: float = 1e-5) -> Case:
    """A call with everything that is optional."""
    row = shape[-1:]
    if op == "add_rms_norm":
        return Case(str(shape), (shape, shape, row), {"eps": eps})
    if op == "bias_dropout_add_layer_norm":
        return Case(str(shape), (shape, row, shape, row, row), {"p": 0.25, "seed": 7, "eps": eps})
    parameters = (row, row) if op == "layer_norm" else (row,)
    return Case(str(shape), (shape, *parameters), {"normalized_shape": row, "eps": eps})


@pytest.mark.parametrize("variant", [v for v in NORMS if "rms_norm" in v.op], ids=variant_id)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_eps_none_is_that_of_the_computation(variant, dtype):
    """Of values as small as these eps is nearly all that the root is taken of."""
    case = case_of(variant.op, 5, 40)
    x, *others = make_inputs(case, dtype, DEVICE)
    inputs = (x * 1e-5, *(others if variant.op == "rms_norm" else (torch.zeros_like(x), others[1])))
    skip_unless_it_runs(variant, inputs, case.options)
    small = inputs[0].double()
    root = (small.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    expected = (small / root * inputs[-1].double()).to(dtype)
    output = as_tuple(autograd.run(variant, inputs, {**case.options, "eps": None}))[0]
    torch.testing.assert_close(output, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_a_list_of_dimensions_is_as_good_as_a_tuple():
    x = torch.randn(3, 4, 5, device=DEVICE)
    for function in (kernel_ladder.layer_norm, kernel_ladder.rms_norm):
        for backend in (None, "torch.naive", "compile"):
            torch.testing.assert_close(function(x, [4, 5], backend=backend), function(x, (4, 5), backend="torch.naive"))
        assert function(x, x.shape[1:]).shape == x.shape


@pytest.mark.parametrize("length", [6600, 26400], ids=["in-a-block", "past-a-block"])
@pytest.mark.parametrize("variant", [v for v in OWN_BACKWARD if v.op in ("layer_norm", "rms_norm")], ids=variant_id)
def test_rows_of_several_dimensions_in_another_order(variant, length):
    """They are copied, so that kernels get rows of another layout than `unsupported` has seen."""
    shape, made = (4, length // 4), (length // 4, 4)
    x, weight = (torch.randn(*size, device=DEVICE).half().mT for size in ((3, *made), made))
    bias = torch.randn(shape, device=DEVICE).half()
    inputs = (x, weight, bias) if variant.op == "layer_norm" else (x, weight)
    options = {"normalized_shape": shape, "eps": 1e-5}
    spec, grad = kernel_ladder.spec(variant.op), grad_if_taken(variant, inputs, options)
    result = agreement(spec, lambda *given, **o: autograd.run(variant, given, o), inputs, options, grad)
    assert result.agrees, str(result)


@needs_extension
@needs_gpu
@pytest.mark.parametrize("length", [8, 1024, 20000, 40000])
def test_a_cluster_takes_rows_that_one_block_holds(length):
    """The operators themselves ask less than the table does. Distributed shared memory needs a launch of clusters."""
    x, weight = torch.randn(5, length, device=DEVICE).half(), torch.randn(length, device=DEVICE).half()
    if (reason := built_for.without_clusters(x.get_device())) is not None:
        pytest.skip(reason)
    output, _ = torch.ops.kernel_ladder.rms_norm.cluster(x, weight, 1e-5, False)
    expected = torch.nn.functional.rms_norm(x.float(), (length,), weight.float(), 1e-5)
    torch.testing.assert_close(output.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("variant", OWN_BACKWARD, ids=variant_id)
@pytest.mark.parametrize(
    ("length", "dtype"),
    [(24, torch.float32), (1100, torch.float32), pytest.param(16384, torch.bfloat16, marks=needs_gpu)],
    ids=str,
)
def test_only_what_is_wanted_is_made_and_it_is_the_same(variant, length, dtype):
    rows = 21 if DEVICE.type == "cuda" or variant.level != "triton" else 3  # an interpreter takes minutes for 21
    case = case_of(variant.op, rows, length)
    inputs = make_inputs(case, dtype, DEVICE)
    skip_unless_it_runs(variant, as_leaves(inputs), case.options)
    with torch.no_grad():
        output, saved = variant.forward(*inputs, **case.options)
        grad = tuple(map(torch.randn_like, output)) if isinstance(output, tuple) else torch.randn_like(output)
        everything = variant.backward(saved, grad, (True,) * len(inputs))
        for needs in itertools.product((False, True), repeat=len(inputs)):
            some = variant.backward(saved, grad, needs)
            assert [x is not None for x in some] == list(needs)
            for x, same in zip(some, everything, strict=True):
                assert x is None or torch.equal(x, same)


@pytest.mark.parametrize("variant", OWN_BACKWARD, ids=variant_id)
def test_no_rows_give_zeros_for_the_parameters(variant):
    case = case_of(variant.op, 0, 24)
    inputs = make_inputs(case, torch.float32, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    output, saved = variant.forward(*inputs, **case.options)
    grad = output if not isinstance(output, tuple) else tuple(output)
    for x, of_x in zip(inputs, variant.backward(saved, grad, (True,) * len(inputs)), strict=True):
        assert of_x.shape == x.shape
        assert not of_x.any()


@pytest.mark.parametrize("variant", [v for v in OWN_BACKWARD if v.op == "add_rms_norm"], ids=variant_id)
def test_input_and_residual_share_one_gradient(variant):
    case = case_of(variant.op, 3, 24)
    inputs = make_inputs(case, torch.float32, DEVICE)
    skip_unless_it_runs(variant, inputs, case.options)
    outputs, saved = variant.forward(*inputs, **case.options)
    of_input, of_residual, _ = variant.backward(saved, outputs, (True, True, True))
    assert of_input is of_residual


#: More rows than a GPU goes through at once, so that blocks and programs loop several times, the last time not full,
#: and fewer; rows shared by a part of a warp, by warps, by a block, by a cluster; whole vectors and not; rows that
#: leave threads of those who share them idle.
MANY_ROWS = [
    (140_003, 8),
    (70_001, 24),
    (20_011, 208),
    (20_011, 256),
    (9001, 440),
    (9001, 480),
    (9001, 512),
    (9001, 776),
    (9001, 904),
    (9001, 1024),
    (5003, 1800),
    (5003, 2048),
    (5003, 2047),
    (2503, 3080),
    (2502, 3600),
    (2503, 4096),
    (2503, 4090),
    (1201, 4104),
    (1201, 8200),
    (1201, 10240),
    (701, 12296),
    (702, 13328),
    (701, 14344),
    (701, 16384),
    (3, 16376),
    (701, 16383),
    (401, 20_008),
    (203, 65536),
    (203, 65529),
    (45, 70_016),
    (61, 98_304),
    (61, 98_312),
    (67, 131072),
    (45, 200_000),
    (45, 200_008),
    (45, 262_144),
]


@pytest.mark.sampled
@needs_gpu
@pytest.mark.parametrize("shape", MANY_ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", [v for v in OWN_BACKWARD if "naive" not in v.name] + PERSISTENT, ids=variant_id)
def test_many_rows(variant, dtype, shape):
    spec, case = kernel_ladder.spec(variant.op), case_of(variant.op, *shape)
    inputs = make_inputs(case, dtype, DEVICE)
    grad = grad_if_taken(variant, inputs, case.options)
    result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, case.options, grad)
    assert result.agrees, str(result)


#: Shape and strides of the chain's input, and why Triton's clusters leave it to others, or None.
CLUSTERED_CHAINS = [
    ((6, 4096), (4096, 1), None),
    ((3, 2, 65536), (131072, 65536, 1), None),
    ((1, 4096), (4097, 1), None),
    ((6, 1, 4096), (4112, 4097, 1), None),
    ((6, 1, 4096), (4104, 4096, 1), None),
    ((6, 4104), (4104, 1), None),
    ((6, 1, 4096), (4100, 4096, 1), "multiples of 16 bytes"),
    ((6, 4100), (4100, 1), "multiples of 16 bytes"),
    ((6, 2048), (2048, 1), "rows of 2049 to 131072 elements"),
    ((2, 262144), (262144, 1), "rows of 2049 to 131072 elements"),
]


@pytest.mark.parametrize(("shape", "strides", "reason"), CLUSTERED_CHAINS, ids=str)
def test_what_the_chain_on_clusters_takes(monkeypatch, shape, strides, reason):
    """Rows that are copied in whole vectors; of one row, and of dimensions of one, no stride matters."""
    monkeypatch.setattr(cluster, "unsupported_by_triton", lambda x: None)  # there need be no GPU
    monkeypatch.setattr(cluster, "unsupported_by_gluon", lambda x: None)
    with FakeTensorMode():
        x = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="cuda")
        dense, row = torch.empty(shape, dtype=x.dtype, device="cuda"), x.new_empty(shape[-1])
        found = cluster.unsupported(x, row, dense, row, None)
    assert found is None if reason is None else reason in found


@needs_gpu
@pytest.mark.parametrize("shape", [(20_011, 256), (2503, 4096), (701, 16384), (203, 65536)], ids=str)
@pytest.mark.parametrize("variant", OWN_BACKWARD, ids=variant_id)
def test_the_same_bits_every_time(variant, shape):
    spec, case = kernel_ladder.spec(variant.op), case_of(variant.op, *shape)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    skip_unless_it_runs(variant, as_leaves(inputs), case.options)
    grad = make_grad(spec, inputs, case.options)
    with torch.no_grad():
        _, saved = variant.forward(*inputs, **case.options)
        first = variant.backward(saved, grad, (True,) * len(inputs))
        for _ in range(3):
            busy = torch.randn(math.prod(shape), device=DEVICE).sort()  # other work beside it, and memory used anew
            again = variant.backward(saved, grad, (True,) * len(inputs))
            assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
            del busy


@needs_gpu
@pytest.mark.parametrize("length", [4096, 16384, 65536, 131072, 262144])
@pytest.mark.parametrize(
    "variant", [v for v in OWN_BACKWARD if v.level == "cuda" or v.name == "triton.cluster"] + PERSISTENT, ids=variant_id
)
def test_values_that_a_thread_sees_first_lie_far_from_the_others(variant, length):
    """Statistics may be taken about a mean of those; what then cancels must not show."""
    spec, case = kernel_ladder.spec(variant.op), case_of(variant.op, 7, length)
    inputs = list(make_inputs(case, torch.bfloat16, DEVICE))
    for at, far in ((0, 300.0), (256, -5000.0), (4096 - 8, 1e4)):
        inputs[0][:, at : at + 256] += far
    grad = grad_if_taken(variant, inputs, case.options)
    result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, case.options, grad)
    assert result.agrees, str(result)


@needs_gpu
@pytest.mark.parametrize("length", [4096, 16384, 65536, 98304, 131072])
@pytest.mark.parametrize(
    "variant", [v for v in OWN_BACKWARD if v.op == "layer_norm" and v.level == "cuda"], ids=variant_id
)
def test_sums_whose_square_is_no_float(variant, length):
    """Squares of deviations add up to a float here, the square of their sum does not."""
    x = torch.zeros(3, length, dtype=torch.bfloat16, device=DEVICE)
    x[:, length // 4 :] = 5e16
    weight, bias = torch.ones_like(x[0]), torch.zeros_like(x[0])
    case = case_of("layer_norm", 3, length)
    skip_unless_it_runs(variant, (x, weight, bias), case.options)
    output = kernel_ladder.layer_norm(x, (length,), weight, bias, backend=variant.name)
    expected = torch.nn.functional.layer_norm(x.double(), (length,))
    torch.testing.assert_close(output.double(), expected, rtol=2**-7, atol=0)


@needs_gpu
@pytest.mark.parametrize("length", [248, 512, 1024, 3080, 4104, 16384, 65544])
@pytest.mark.parametrize("variant", [v for v in OWN_BACKWARD if "naive" not in v.name], ids=variant_id)
def test_rows_with_gaps_and_gradients_of_any_stride(variant, length):
    """Rows on 16 bytes with space between them, in a batch of two strides; a gradient that is one value everywhere."""
    spec = kernel_ladder.spec(variant.op)
    case = case_of(variant.op, 6, 35, length)
    inputs = make_inputs(case, torch.bfloat16, DEVICE)
    wide = torch.randn(6, 40, length + 8, device=DEVICE).bfloat16()
    inputs = (wide[:, 5:, :length], *inputs[1:])
    skip_unless_it_runs(variant, as_leaves(inputs), case.options)
    for grad in (make_grad(spec, inputs, case.options), torch.ones((), device=DEVICE, dtype=torch.bfloat16)):
        if isinstance(grad, torch.Tensor) and grad.dim() == 0:
            grad = tuple(grad.expand(s) for s in spec.output_shapes(inputs, case.options))
            grad = grad if len(grad) > 1 else grad[0]
        result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, case.options, grad)
        assert result.agrees, str(result)


@pytest.mark.sampled
@needs_gpu
@pytest.mark.parametrize("length", [256, 1024, 4096, 16384, 65536, 131072])
@pytest.mark.parametrize(
    "variant", [v for v in OWN_BACKWARD if v.op.endswith("layer_norm") and "naive" not in v.name], ids=variant_id
)
def test_parameters_that_are_absent(variant, length):
    """Of weight and bias either, both and none, with gradients and without: kernels are made for each."""
    spec, case = kernel_ladder.spec(variant.op), case_of(variant.op, 35, length)
    *others, weight, bias = make_inputs(case, torch.bfloat16, DEVICE)
    for inputs in ((*others, *last) for last in itertools.product((weight, None), (bias, None))):
        skip_unless_it_runs(variant, as_leaves(inputs), case.options)
        for grad in (None, make_grad(spec, inputs, case.options)):
            result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, case.options, grad)
            assert result.agrees, f"{[x is not None for x in inputs]}, {grad is not None}: {result}"
