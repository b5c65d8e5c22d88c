"""What only a GPU can show: streams, graphs, a second device, tensors past 2³¹ elements."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import kernel_ladder
from kernel_ladder import autograd, table
from kernel_ladder.semantics.float8 import FLOAT8
from kernel_ladder.spec import as_leaves, as_tuple, each
from kernel_ladder.testing.agreement import agreement
from kernel_ladder.testing.deviation import compare
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import (
    captured,
    every_variant,
    needs_extension,
    needs_gpu,
    skip_unless_it_runs,
    typical_case,
    variant_id,
)

pytestmark = needs_gpu

LAUNCHING = every_variant("cuda", "triton")


def call(variant, inputs, options):
    with torch.no_grad():
        return autograd.run(variant, inputs, options)


@pytest.mark.parametrize("variant", LAUNCHING, ids=variant_id)
def test_runs_on_the_current_stream(variant):
    spec, case = kernel_ladder.spec(variant.op), typical_case(variant.op)
    old = make_inputs(case, torch.bfloat16, "cuda", seed=1)
    new = make_inputs(case, torch.bfloat16, "cuda", seed=2)
    skip_unless_it_runs(variant, old, case.options)
    call(variant, old, case.options)  # compiled and tuned before the clock of the other stream matters
    inputs = each(torch.Tensor.clone, old)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # a launch on any other stream would overtake this and read the old data
        for x, fresh in zip(inputs, new, strict=True):
            x.copy_(fresh)
        output = call(variant, inputs, case.options)
    side.synchronize()
    result = agreement(spec, lambda *_, **options: output, new, case.options)
    assert result.agrees, str(result)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("variant", LAUNCHING, ids=variant_id)
def test_capture_and_replay_in_a_cuda_graph(variant, backward):
    if backward and variant.backward is None:
        pytest.skip("PyTorch differentiates this variant")
    spec, case = kernel_ladder.spec(variant.op), typical_case(variant.op)
    inputs = make_inputs(case, torch.bfloat16, "cuda", seed=1)
    skip_unless_it_runs(variant, as_leaves(inputs) if backward else inputs, case.options)
    grad = make_grad(spec, inputs, case.options)

    def work():
        with torch.no_grad():
            output, saved = variant.forward(*inputs, **case.options)
            return output, variant.backward(saved, grad, (True,) * len(inputs)) if backward else ()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        results = work()
    for seed in (2, 3):
        new = make_inputs(case, torch.bfloat16, "cuda", seed=seed)
        for x, fresh in zip(inputs, new, strict=True):
            x.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        # What one call outside the graph gives on the same data; both are held to the oracle by agreement's own test.
        result = agreement(spec, lambda *_, **options: results[0], new, case.options)
        assert result.agrees, str(result)
        for replayed, direct in zip(results[1], work()[1], strict=True):
            torch.testing.assert_close(replayed, direct)


@pytest.mark.parametrize("variant", [v for v in LAUNCHING if v.level == "cuda"], ids=variant_id)
def test_a_saved_tensor_of_another_device_is_refused(variant):
    """A kernel that takes its address would read or write outside of the GPU's memory."""
    if variant.backward is None:
        pytest.skip("PyTorch differentiates this variant")
    spec, case = kernel_ladder.spec(variant.op), typical_case(variant.op)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    skip_unless_it_runs(variant, as_leaves(inputs), case.options)
    grad = make_grad(spec, inputs, case.options)
    with torch.no_grad():
        _, saved = variant.forward(*inputs, **case.options)
        for place, x in enumerate(saved):
            if isinstance(x, torch.Tensor) and x.is_cuda and x.numel():
                moved = (*saved[:place], x.cpu(), *saved[place + 1 :])
                said = r"CUDA|GPU|device|forward pass|must be those"
                with pytest.raises((ValueError, RuntimeError, AssertionError), match=said):
                    variant.backward(moved, grad, (True,) * len(inputs))
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU is visible, this needs two")
@pytest.mark.parametrize("variant", every_variant(), ids=variant_id)
def test_a_second_device(variant):
    spec, case = kernel_ladder.spec(variant.op), typical_case(variant.op)
    inputs = make_inputs(case, torch.bfloat16, "cuda:1")
    skip_unless_it_runs(variant, as_leaves(inputs), case.options)
    grad = make_grad(spec, inputs, case.options)
    with torch.cuda.device(0):
        result = agreement(spec, lambda *x, **o: autograd.run(variant, x, o), inputs, case.options, grad)
        assert torch.cuda.current_device() == 0
    assert result.agrees, str(result)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU is visible, this needs two")
@pytest.mark.parametrize("op", [op for op in kernel_ladder.OPS if len(typical_case(op).shapes) > 1])
@pytest.mark.parametrize("backend", ["torch", "cuda", "triton"])
def test_inputs_on_two_gpus(op, backend):
    case = typical_case(op)
    *others, last = make_inputs(case, torch.bfloat16, "cuda:0")
    with pytest.raises(ValueError, match="must be on the same device, got cuda:0 and cuda:1"):
        getattr(kernel_ladder, op)(*others, last.to("cuda:1"), **case.options, backend=backend)


#: Rows of 32768 that pass 2³¹ elements by one row.
HUGE = (2**16 + 1, 2**15)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "variant",
    # Dropout of a row depends on where the row stands; tests/ops/test_dropout.py has a test of its own.
    [v for v in LAUNCHING if len(typical_case(v.op).shapes) == 1 and v.op != "dropout"],
    ids=variant_id,
)
def test_more_elements_than_a_32_bit_index_holds(variant, backward, gpu_memory):
    spec, options = kernel_ladder.spec(variant.op), dict(typical_case(variant.op).options)
    if "dim" in options:
        options["dim"] = -1
    gpu_memory((5 if backward else 3) * 2 * math.prod(HUGE) * 1.2)
    input = torch.empty(HUGE, dtype=torch.bfloat16, device="cuda").normal_()
    skip_unless_it_runs(variant, (input,), options)
    with torch.no_grad():
        output, saved = variant.forward(input, **options)
        results = {"output": output}
        if backward:
            grad = torch.empty_like(output).normal_()
            results["grad 0"] = variant.backward(saved, grad, (True,))[0]
    # Rows are independent in an elementwise or a row operation: the first, those astride 2³¹, and the last.
    for rows in (slice(0, 2), slice(HUGE[0] // 2 - 1, HUGE[0] // 2 + 1), slice(HUGE[0] - 2, HUGE[0])):
        part = input[rows].clone().requires_grad_()
        exact_part = input[rows].double().requires_grad_()
        naive, exact = spec.reference(part, **options), spec.reference(exact_part, **options)
        expected = {"output": (exact, naive)}
        if backward:
            expected["grad 0"] = (
                torch.autograd.grad(exact, exact_part, grad[rows].double())[0],
                torch.autograd.grad(naive, part, grad[rows])[0],
            )
        for name, (exactly, naively) in expected.items():
            deviation = compare(name, results[name][rows], exactly.detach(), naively.detach())
            assert deviation.agrees, f"rows {rows}: {deviation}"


@pytest.mark.parametrize("variant", LAUNCHING, ids=variant_id)
def test_waits_for_the_kernel_before_it(variant):
    """Kernels that are launched while the one before still runs see all that it wrote, and leave what it reads."""
    case = typical_case(variant.op)
    inputs = make_inputs(case, torch.bfloat16, "cuda", seed=1)
    skip_unless_it_runs(variant, inputs, case.options)

    level = "triton" if table.unavailable("add", "cuda") else "cuda"

    def shifted(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        if x.dtype == FLOAT8:
            return kernel_ladder.add(x.to(by.dtype), by, backend=level).to(FLOAT8)
        return kernel_ladder.add(x, by.to(x.dtype), backend=level).view(x.shape) if x.is_floating_point() else x

    def outputs(between) -> list:
        found = []
        for by in torch.arange(30, device="cuda").to(torch.bfloat16).split(1):
            # Written by a kernel that is launched early itself, into memory that the last turn's inputs had.
            written = each(functools.partial(shifted, by=by), inputs)
            between()
            found += as_tuple(call(variant, written, case.options))
            between()
        return found

    at_once, one_by_one = outputs(lambda: None), outputs(torch.cuda.synchronize)
    assert all(torch.equal(a, b) for a, b in zip(at_once, one_by_one, strict=True))


@needs_extension
def test_memory_that_is_short_is_pytorchs_own_error():
    x = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(2**20, 2**20)
    with pytest.raises(torch.OutOfMemoryError, match="could not allocate"):
        kernel_ladder.add(x, x, backend="cuda.vectorized")
    assert kernel_ladder.add(x[:2, :2], x[:2, :2], backend="cuda.vectorized").tolist() == [[2, 2], [2, 2]]
