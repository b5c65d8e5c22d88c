"""Warp-specialised Gluon kernels in Python, against float64: no interpreter takes them, and CI has no GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

import kernel_ladder
from kernel_ladder import autograd, spec, table
from kernel_ladder.spec import Case, Inputs, as_leaves
from kernel_ladder.testing.agreement import agreement, evaluate
from kernel_ladder.testing.samples import make_grad, make_inputs
from triton_impl.attention import (
    backward,
    specialized_backward,
    specialized_keys,
    specialized_passing,
    specialized_queries,
    warp_specialized,
)
from triton_impl.attention.call import Call, saved_from
from triton_impl.runtime.launch_cache import LaunchCache

from ..conftest import needs_gpu, skip_unless_it_runs
from .gluon_emulator import DeadlockError, EmulatedLaunch, EveryConfiguration, Products, Shared, launch


class Sample(NamedTuple):
    """Shapes and options of a call."""

    heads: tuple[int, int]
    lengths: tuple[int, int]
    dims: tuple[int, int]
    is_causal: bool | str = False
    window_size: tuple[int, int] = (-1, -1)

    def case(self) -> Case:
        (h, h_kv), (q, k), (d, d_v) = self.heads, self.lengths, self.dims
        options = {"is_causal": self.is_causal, "scale": None, "enable_gqa": h != h_kv, "window_size": self.window_size}
        return Case("", ((2, h, q, d), (2, h_kv, k, d), (2, h_kv, k, d_v)), options)


SAMPLES = {
    "full": Sample((2, 2), (128, 128), (64, 64)),
    "ragged": Sample((2, 1), (100, 150), (64, 64)),
    "causal": Sample((1, 1), (200, 200), (64, 64), is_causal=True),
    "causal-pairs": Sample((5, 5), (130, 130), (64, 64), is_causal=True),
    "lower-right": Sample((2, 1), (70, 190), (64, 64), is_causal="lower_right"),
    "causal-more-queries": Sample((1, 1), (260, 65), (64, 64), is_causal="lower_right"),
    "window": Sample((2, 2), (300, 300), (64, 64), window_size=(40, 20)),
    "window-causal": Sample((2, 1), (130, 257), (64, 64), is_causal="lower_right", window_size=(90, -1)),
    "window-of-tiles": Sample((1, 1), (640, 640), (64, 64), window_size=(330, 260)),
    "window-of-tiles-causal": Sample((1, 1), (500, 640), (64, 64), is_causal="lower_right", window_size=(400, -1)),
    "other-values": Sample((1, 1), (65, 129), (128, 64)),
    "padded-dims": Sample((1, 1), (64, 64), (40, 72), is_causal=True),
}


@pytest.fixture
def emulated(monkeypatch) -> dict[str, EveryConfiguration]:
    """Host code launches the emulator; what chose among configurations, by module."""
    for module in (warp_specialized, specialized_keys, specialized_queries):
        monkeypatch.setattr(module, "DescriptorLaunch", EmulatedLaunch)
    for module in (warp_specialized, specialized_passing):
        monkeypatch.setattr(module, "multiprocessors", lambda *_: 3)
    monkeypatch.setattr(backward, "_launches", LaunchCache())
    monkeypatch.setattr(specialized_backward, "launch_delta", delta_in_pytorch)
    monkeypatch.setattr(specialized_backward, "LONG", 0)
    monkeypatch.setattr(specialized_backward, "SEEN", 0)
    made = {"forward": EveryConfiguration(2), "keys": EveryConfiguration(2), "queries": EveryConfiguration(1)}
    monkeypatch.setattr(warp_specialized, "_autotuner", made["forward"])
    monkeypatch.setattr(specialized_keys, "_autotuner", made["keys"])
    monkeypatch.setattr(specialized_queries, "_autotuner", made["queries"])
    return made


def delta_in_pytorch(call: Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    """As `launch_delta`, whose kernel runs on a GPU or in Triton's interpreter alone."""

    def run(*tensors: torch.Tensor, values: tuple[Any, ...] = ()) -> None:
        delta, output, grad, grad_lse = tensors
        of_rows = (output.float() * grad.float()).sum(-1).flatten()
        delta.view(-1).copy_(of_rows if grad_lse is delta else of_rows - grad_lse.flatten())

    run(*tensors)
    return run


def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    output, lse = (x.fill_(math.nan) for x in call.empty_results())
    warp_specialized._first(call, output, lse)
    return output, lse


def call_of(case: Case, inputs: Inputs) -> Call:
    return Call.of(*inputs, None, case.options["is_causal"], None, case.options["window_size"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_forward_kernel_agrees(sample, dtype, emulated):
    case = SAMPLES[sample].case()
    inputs = make_inputs(case, dtype, "cpu")
    output, _ = forward(call_of(case, inputs))
    found = agreement(spec("attention"), lambda *_, **options: output, inputs, case.options)
    assert found.agrees, str(found)
    assert emulated["forward"].ran


def test_the_log_sum_exp_agrees(emulated):
    case = SAMPLES["causal-more-queries"].case()
    call = call_of(case, make_inputs(case, torch.bfloat16, "cpu"))
    _, lse = forward(call)
    exact = [x.double() for x in (call.q, call.k, call.v)]
    _, expected = kernel_ladder.attention(*exact, backend="torch.naive", return_lse=True, **case.options)
    torch.testing.assert_close(lse.view(expected.shape).double() * math.log(2), expected, rtol=1e-5, atol=1e-5)
    assert bool(expected.isneginf().any()), "the first queries see no key"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_kernels_of_gradients_agree(sample, dtype, emulated):
    case = SAMPLES[sample].case()
    inputs = make_inputs(case, dtype, "cpu")
    grad = make_grad(spec("attention"), inputs, case.options)
    found = agreement(spec("attention"), differentiated(), inputs, case.options, grad)
    assert found.agrees, str(found)
    assert emulated["keys"].ran
    assert emulated["queries"].ran


def rung(step: str) -> table.Variant:
    return next(v for v in table.variants("attention", "triton") if v.name == f"triton.{step}")


def in_pytorch(*inputs: torch.Tensor, return_lse: bool = False, **options: Any) -> tuple[Any, tuple]:
    """A rung's forward pass as `torch.naive` computes it, and what the kernels' backward pass needs of it."""
    results = kernel_ladder.attention(*inputs, backend="torch.naive", return_lse=True, **options)
    saved = saved_from(inputs, results, options)
    return (results if return_lse else results[0]), saved


def differentiated() -> Any:
    """Attention whose gradients are those of the emulated kernels."""
    made = {"forward": in_pytorch, "inference": None, "backward": specialized_backward.attention_backward}
    variant = dataclasses.replace(rung("warp_specialized"), **made)
    return lambda *x, **options: autograd.run(variant, x, options)


LARGE = {
    "grouped": Sample((4, 2), (1000, 1500), (128, 128)),
    "causal-narrow": Sample((3, 3), (2048, 2048), (64, 64), is_causal=True),
    "causal-wide": Sample((2, 1), (1500, 1500), (128, 128), is_causal=True),
}


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sample", [*SAMPLES, *LARGE])
def test_the_kernels_of_gradients_agree_on_a_gpu(sample, dtype, monkeypatch):
    monkeypatch.setattr(specialized_backward, "LONG", 0)
    monkeypatch.setattr(specialized_backward, "SEEN", 0)
    variant = rung("warp_specialized")
    case = (SAMPLES | LARGE)[sample].case()
    inputs = make_inputs(case, dtype, "cuda")
    skip_unless_it_runs(variant, inputs, case.options)
    grad = make_grad(spec("attention"), inputs, case.options)

    def run(*x: torch.Tensor, **options: Any) -> Any:
        return autograd.run(variant, x, options)

    found = agreement(spec("attention"), run, inputs, case.options, grad)
    assert found.agrees, str(found)
    first, *others = [evaluate(run, inputs, case.options, grad) for _ in range(5)]
    assert all(torch.equal(x, other[name]) for name, x in first.items() for other in others), "not the same bits"


def test_gradients_that_no_descriptor_describes_are_copied(emulated):
    """The gradient of a sum is one number, expanded."""
    case = SAMPLES["ragged"].case()
    inputs = as_leaves(make_inputs(case, torch.bfloat16, "cpu"))
    output = differentiated()(*inputs, **case.options)
    output.sum().backward()
    expected = torch.ones(()).bfloat16().expand(output.shape)
    assert specialized_backward.describable(expected).stride() == output.stride()
    assert specialized_backward.describable(output) is output
    standard = as_leaves(make_inputs(case, torch.bfloat16, "cpu"))
    kernel_ladder.attention(*standard, backend="torch.naive", **case.options).sum().backward()
    for x, y in zip(inputs, standard, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_wanted_is_computed(needs, emulated):
    case = SAMPLES["causal"].case()
    inputs = make_inputs(case, torch.bfloat16, "cpu")
    leaves = [x.requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    differentiated()(*leaves, **case.options).sum().backward()
    assert [x.grad is not None for x in leaves] == list(needs)
    assert bool(emulated["queries"].ran) == needs[0]
    assert bool(emulated["keys"].ran) == (needs[1] or needs[2])


def test_the_gradient_of_the_log_sum_exp_counts(emulated):
    case = SAMPLES["ragged"].case()
    grads = []
    for run in (differentiated(), lambda *x, **o: kernel_ladder.attention(*x, backend="torch", **o)):
        leaves = as_leaves(make_inputs(case, torch.bfloat16, "cpu"))
        output, lse = run(*leaves, **case.options, return_lse=True)
        (output.float().square().sum() + lse.square().sum()).backward()
        grads.append([x.grad for x in leaves])
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    ("dims", "keys", "window", "others"),
    [
        ((192, 128), 4096, (-1, -1), True),
        ((64, 64), 2047, (-1, -1), True),
        ((64, 64), 2048, (-1, -1), False),
        ((64, 64), 2048, (1023, 0), False),
        ((64, 64), 2048, (1021, 0), True),
    ],
)
def test_wide_heads_and_few_keys_have_the_kernels_of_flash(dims, keys, window, others, emulated, monkeypatch):
    monkeypatch.setattr(specialized_backward, "LONG", 2**17)
    monkeypatch.setattr(specialized_backward, "SEEN", 2**16)
    case = Sample((1, 1), (1, keys), dims, window_size=window).case()
    taken = []
    monkeypatch.setattr(backward, "attention_backward", lambda *arguments: taken.append(arguments) or (None,) * 3)
    output = differentiated()(*as_leaves(make_inputs(case, torch.bfloat16, "cpu")), **case.options)
    output.sum().backward()
    assert [first for _, _, _, *first in taken] == [[] if others else [specialized_backward._first_launches]]


# ---- the emulator --------------------------------------------------------------------------------------------------


@gluon.jit
def _waits(barriers, phase):
    mbarrier.wait(barriers.index(0), phase)


@gluon.jit
def _arrives(barriers, phase):
    mbarrier.arrive(barriers.index(0), count=1)


@gluon.jit
def _meeting_kernel(ARRIVALS: gl.constexpr, PHASE: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=ARRIVALS)
    gl.warp_specialize([(_waits, (barriers, PHASE)), (_arrives, (barriers, PHASE))], [4], [24])


def test_what_waits_for_ever_is_an_error():
    launch(_meeting_kernel, 1, ARRIVALS=1, PHASE=0)
    launch(_meeting_kernel, 1, ARRIVALS=2, PHASE=1)  # the phase before the first has ended
    with pytest.raises(DeadlockError, match="every partition waits"):
        launch(_meeting_kernel, 1, ARRIVALS=2, PHASE=0)


def test_a_barrier_that_more_arrive_at_than_it_counts_is_an_error():
    with pytest.raises(AssertionError, match="not initialised"):
        launch(_meeting_kernel, 1, ARRIVALS=0, PHASE=1)


def test_a_product_is_nothing_before_it_is_waited_for():
    products, a, b = Products(), Shared(torch.eye(2)), Shared(torch.ones(2, 2))
    first = products.issue(a, b, torch.zeros(2, 2), is_async=True)
    second = products.issue(first, b, first, is_async=True)
    assert bool(first.isnan().all())
    assert products.wait(1, deps=[first]) is first
    assert torch.equal(first, torch.ones(2, 2))
    assert bool(second.isnan().all())
    products.wait(0)
    assert torch.equal(second, torch.full((2, 2), 3.0))


def test_what_a_product_reads_may_not_be_written_meanwhile():
    products, a, b = Products(), Shared(torch.eye(2)), Shared(torch.ones(2, 2))
    products.issue(a, b, torch.zeros(2, 2), is_async=True)
    b.store(torch.zeros(2, 2))
    with pytest.raises(AssertionError, match="reads what is written meanwhile"):
        products.wait(0)
