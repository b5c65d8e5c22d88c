"""In a graph, ``"auto"`` leaves to the compiler what a kernel's launch outlasts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_ladder
from kernel_ladder import gpu, selection
from kernel_ladder.selection import small
from kernel_ladder.spec import Case
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.samples import make_inputs, on_absent_gpu

from ..conftest import needs_extension, needs_gpu, public, typical_case

FUSED = sorted(small.FUSED)
needs_cuda_tensors = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="PyTorch is built for the CPU: no tensors of a GPU"
)
DECODING = {"is_causal": False, "scale": None, "enable_gqa": True, "return_lse": False}


@pytest.mark.parametrize("op", FUSED)
@pytest.mark.parametrize(
    ("backend", "gradients", "left"), [("auto", False, True), ("auto", True, False), ("cuda", False, False)]
)
def test_small_calls_without_gradients_are_left_to_the_compiler(op, backend, gradients, left):
    case = typical_case(op)
    with gpu.pretend("H100"), on_absent_gpu(case, torch.bfloat16, gradients=gradients) as inputs:
        found = small.left_to_compiler(op, backend, inputs, case.options)
        assert (found is not None and found.name == "compile.default") is left


def test_large_calls_and_those_of_other_operations_are_not():
    sizes = small.FEW, small.FEW + 1
    there, more = (SimpleNamespace(numel=lambda n=n: n, is_cuda=True, requires_grad=False) for n in sizes)
    assert small.left_to_compiler("gelu", "auto", (there,), {"approximate": "none"}) is not None
    assert small.left_to_compiler("gelu", "auto", (more,), {"approximate": "none"}) is None
    assert small.left_to_compiler("matmul", "auto", (there, there), {}) is None
    assert small.left_to_compiler("gelu", "auto", (torch.empty(3),), {"approximate": "none"}) is None, "on a CPU"


def graph_of(function, *inputs) -> list[torch.fx.Node]:
    """The nodes of a function's graph, as a compiler gets them."""
    graphs = []

    def keep(graph, given):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    torch.compile(function, fullgraph=True, backend=backend)(*inputs)
    return [node for graph in graphs for node in graph.graph.nodes]


def kernels_of(function, *inputs) -> list[str]:
    """The rungs whose kernels stand in the graph of a function."""
    forward = torch.ops.kernel_ladder.forward.default
    return [node.args[1] for node in graph_of(function, *inputs) if node.target is forward]


@pytest.mark.usefixtures("forget_compiled")
@torch.no_grad()
def test_a_call_adds_no_view_to_a_graph():
    """Its width would be made a constant, which that of a graph of fixed sizes is."""
    x, weight = torch.randn(3, 300), torch.randn(300)
    nodes = graph_of(lambda x, w: kernel_ladder.rms_norm(x, (300,), w, backend="torch"), x, weight)
    views = {torch.ops.aten.expand.default, torch.ops.aten.view.default, torch.ops.aten.alias.default}
    assert len(nodes) > 3
    assert not [node for node in nodes if node.target in views]


@needs_cuda_tensors
@needs_extension
@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.parametrize(("rows", "expected"), [(1, []), (2**16, ["cuda.registers", "cuda.vectorized"])])
def test_a_graph_of_few_rows_has_no_kernel_of_its_own(rows, expected):
    def block(x, weight):
        return kernel_ladder.gelu(kernel_ladder.rms_norm(x, (1024,), weight))

    with gpu.pretend("H100"), FakeTensorMode(), torch.no_grad():
        x, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((rows, 1024), (1024,)))
        assert kernels_of(block, x, weight) == expected


@needs_gpu
@pytest.mark.usefixtures("forget_compiled")
@pytest.mark.parametrize("op", FUSED)
@torch.no_grad()
def test_what_is_left_to_the_compiler_agrees(op):
    case = typical_case(op)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    compiled = torch.compile(lambda *x: public(op, x, case.options), fullgraph=True)
    result = agreement(kernel_ladder.spec(op), lambda *x, **options: compiled(*x), inputs, case.options)
    assert result.agrees, str(result)


@needs_extension
@pytest.mark.parametrize("name", ["A10", "H100"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 8)])
def test_decoding_with_a_mask_shares_the_keys_among_blocks(name, heads, built_everywhere):
    """A cache of fixed size masks its free places. PyTorch's kernel for masks has one block a head for all keys."""
    queries, keys = heads
    shapes = (2, queries, 1, 64), (2, keys, 4096, 64), (2, keys, 4096, 64), (2, 1, 1, 4096)
    case = Case("", shapes, DECODING, kinds={3: "boolean"})
    with gpu.pretend(name), on_absent_gpu(case, torch.bfloat16, gradients=False) as inputs:
        assert selection.resolve("attention", "auto", inputs, case.options).name == "cuda.split_kv"
        assert "split_kv" in selection.why("attention", "auto", inputs, case.options)
    with gpu.pretend(name), on_absent_gpu(case, torch.bfloat16, gradients=True) as inputs:
        assert selection.resolve("attention", "auto", inputs, case.options).name != "cuda.split_kv"
