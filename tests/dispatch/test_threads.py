"""Calls from several threads at once, forward and backward, give what one thread gives."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kernel_ladder
import triton_impl
from kernel_ladder import table
from kernel_ladder.spec import Case, Inputs
from kernel_ladder.table import Variant
from kernel_ladder.testing.agreement import evaluate
from kernel_ladder.testing.samples import make_grad, make_inputs

from ..conftest import DEVICE, needs_gpu, public, typical_case, without_gradient

THREADS, ROUNDS = 4, 2


def _call(op: str) -> tuple[Variant, Inputs, Case] | None:
    """The last of an operation's Triton variants that runs here and takes its typical sample, with that."""
    case = typical_case(op, most=1500)
    for variant in reversed(table.variants(op, "triton")):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = make_inputs(case, dtype, DEVICE)
            if variant.here() is None and variant.unsupported(*inputs, **case.options) is None:
                return variant, inputs, case
    return None


@pytest.mark.slow
@pytest.mark.skipif(table.unavailable("gelu", "triton") is not None, reason="no Triton variant runs here")
def test_operations_from_several_threads():
    """Each thread runs all of the operations, beginning with another one, so that different kernels meet."""
    calls = []
    for op in kernel_ladder.OPS:
        found = _call(op)
        assert found is not None, op
        variant, inputs, case = found
        grad = None if without_gradient(variant) else make_grad(kernel_ladder.spec(op), inputs, case.options)

        def call(*inputs, variant=variant, **options):
            return public(variant.op, inputs, options, backend=variant.name)

        calls.append((variant, call, inputs, case.options, grad))
    alone = [evaluate(call, inputs, options, grad) for _, call, inputs, options, grad in calls]
    start = threading.Barrier(THREADS)

    def run(thread: int) -> list[str]:
        wrong = []
        start.wait()
        for turn in range(ROUNDS * len(calls)):
            i = (thread + turn) % len(calls)
            variant, call, inputs, options, grad = calls[i]
            results = evaluate(call, inputs, options, grad)
            wrong += [f"{variant}: {n}" for n, x in results.items() if not torch.equal(x, alone[i][n])]
        return wrong

    with ThreadPoolExecutor(THREADS) as executor:
        wrong = [w for each in executor.map(run, range(THREADS)) for w in each]
    assert not wrong


@pytest.mark.skipif(not triton_impl.interpreted(), reason="the kernels are compiled here")
def test_a_kernel_launched_directly_from_several_threads():
    """``kernel[grid](...)``, as torch.compile and the strided kernels launch: without the launch cache."""
    from triton_impl.gelu import BLOCK, _gelu_kernel

    x = torch.randn(5 * BLOCK)
    expected = torch.empty_like(x)
    _gelu_kernel[(5,)](expected, x, x.numel(), True, BLOCK)
    start = threading.Barrier(THREADS)

    def run(thread: int) -> bool:
        start.wait()
        same = True
        for _ in range(10):
            y = torch.empty_like(x)
            _gelu_kernel[(5,)](y, x, x.numel(), True, BLOCK)
            same = same and torch.equal(y, expected)
        return same

    with ThreadPoolExecutor(THREADS) as executor:
        assert all(executor.map(run, range(THREADS)))


@needs_gpu
def test_kernels_of_pytorch_by_name_leave_its_choice_to_other_threads():
    """What `torch.nn.attention.sdpa_kernel` sets holds for a whole process: float32 would find no kernel beside it."""
    attention = kernel_ladder.attention
    inputs = {
        "torch.flash": torch.randn(2, 3, 64, 64, device=DEVICE).half(),
        "torch.cudnn": torch.randn(2, 3, 64, 64, device=DEVICE).half(),
        "torch.builtin": torch.randn(2, 3, 64, 64, device=DEVICE),
    }
    alone = {backend: attention(x, x, x, backend=backend) for backend, x in inputs.items()}
    start = threading.Barrier(2 * len(inputs))

    def run(backend: str) -> bool:
        x = inputs[backend]
        start.wait()
        return all(torch.equal(attention(x, x, x, backend=backend), alone[backend]) for _ in range(100))

    with ThreadPoolExecutor(2 * len(inputs)) as executor:
        assert all(executor.map(run, [*inputs, *inputs]))
    assert torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()
