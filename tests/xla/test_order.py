"""The order of a call on a GPU: no operand is read unwritten, and no memory is written while kernels still read it.

On an idle GPU each kernel is over before the host issues the next one, so that a lost order shows nothing. These tests
keep a stream busy by a kernel of one thread, which leaves the multiprocessors to what runs out of order.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernel_ladder as kl
from kernel_ladder import gpu, table
from xla_impl import bridge

from ..conftest import DEVICE, needs_gpu

pytestmark = pytest.mark.skipif(table.unavailable("gelu", "xla") is not None, reason="JAX is not installed")

#: Cycles of a GPU: a tenth of a second.
BUSY = 1 << 28
SHAPE = (1024, 1024)
XLA = {"backend": "xla.jit"}


def full(value: float, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.full(shape, float(value), device=DEVICE)


def leave_nan(shape: tuple[int, ...] = SHAPE, count: int = 1) -> None:
    """Give blocks of NaNs back to PyTorch's allocator, which serves the next tensors of this size from them."""
    blocks = [full(torch.nan, shape) for _ in range(count)]
    blocks.clear()


def slow_copies(monkeypatch) -> None:
    """Each copy that makes a tensor contiguous begins a tenth of a second after what its stream did before."""
    contiguous = torch.Tensor.contiguous

    def slow(x: torch.Tensor, **options: torch.memory_format) -> torch.Tensor:
        if x.is_contiguous():
            return x
        torch.cuda._sleep(BUSY)
        return contiguous(x, **options)

    monkeypatch.setattr(torch.Tensor, "contiguous", slow)


@contextmanager
def on(side: bool):
    """The current stream, or another one."""
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if side else nullcontext():
        yield
    torch.cuda.synchronize()


sides = pytest.mark.parametrize("side", [False, True], ids=["current", "side"])


@needs_gpu
@sides
def test_a_copied_operand_is_written_before_jax_reads_it(monkeypatch, side):
    """The first operand passes as it is; the copy of the second one begins late."""
    with on(side):
        x, other = full(1), torch.arange(SHAPE[0] * SHAPE[1], device=DEVICE, dtype=torch.float32).view(SHAPE).t()
        expected = x + other
        kl.add(x, other, **XLA)  # compiled
        torch.cuda.synchronize()
        slow_copies(monkeypatch)
        leave_nan()
        found = kl.add(x, other, **XLA)
    assert torch.equal(found, expected)


@needs_gpu
@sides
def test_a_copied_gradient_is_written_before_jax_reads_it(monkeypatch, side):
    """The gradient of a sum is one number, expanded: its copy comes after the import of the input."""
    with on(side):
        x = torch.randn(SHAPE, device=DEVICE, requires_grad=True)
        (expected,) = torch.autograd.grad(kl.gelu(x, backend="torch").sum(), x)
        torch.autograd.grad(kl.gelu(x, **XLA).sum(), x)  # compiled
        y = kl.gelu(x, **XLA).sum()
        torch.cuda.synchronize()
        slow_copies(monkeypatch)
        leave_nan()
        (found,) = torch.autograd.grad(y, x)
    torch.testing.assert_close(found, expected)


@needs_gpu
@sides
def test_copies_of_three_operands_as_attention_gets_them(monkeypatch, side):
    """Queries, keys and values are views of one product, in the forward and in the backward pass."""

    def attention(qkv: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = qkv.view(2, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
        y = kl.attention(query, key, value, is_causal=True, backend=backend)
        return y, torch.autograd.grad(y.sin().sum(), qkv)[0]

    with on(side):
        qkv = torch.randn(2, 128, 3 * 256, device=DEVICE, requires_grad=True)
        expected = attention(qkv, "torch.naive")
        attention(qkv, "xla.jit")  # compiled
        torch.cuda.synchronize()
        slow_copies(monkeypatch)
        leave_nan((2, 4, 128, 64), count=3)
        found = attention(qkv, "xla.jit")
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@needs_gpu
@sides
def test_memory_of_a_dropped_input_waits_for_jax(side):
    with on(side):
        kl.add(full(1), full(1).t(), **XLA)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY)
        x = full(1)
        found = kl.add(x, x.t(), **XLA)
        del x
        written = [full(torch.nan) for _ in range(3)]  # the input's memory, and its copy's
    assert (found == 2).all()
    assert len(written) == 3


@needs_gpu
@sides
def test_memory_of_a_dropped_result_waits_for_its_readers(side):
    with on(side):
        x, zero = full(1), full(0)
        kl.add(zero, zero, **XLA)
        torch.cuda.synchronize()
        y = kl.add(x, x, **XLA)
        torch.cuda._sleep(BUSY)
        found = y.clone()
        del y
        for _ in range(4):
            kl.add(zero, zero, **XLA)
    assert (found == 2).all()


@needs_gpu
def test_a_seed_is_not_written_to_a_result_that_is_still_read():
    x = full(1, (2,))
    kl.dropout(x, 0.5, seed=1, **XLA)
    kl.add(x, x, **XLA)
    torch.cuda.synchronize()
    results = [kl.add(x, x, **XLA) for _ in range(8)]
    torch.cuda._sleep(BUSY)
    found = [y.clone() for y in results]
    results.clear()
    for seed in range(8):
        kl.dropout(x, 0.5, seed=seed, **XLA)
    torch.cuda.synchronize()
    assert all((y == 2).all() for y in found)


@needs_gpu
def test_compilation_writes_to_no_result_that_is_still_read():
    """XLA times candidates of a product on memory of its own, which may be that of dropped results."""
    x = full(1)
    a, b = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((1000, 1032), (1032, 1048)))
    kl.add(x, x, **XLA)
    torch.cuda.synchronize()
    results = [kl.add(x, x, **XLA) for _ in range(8)]
    torch.cuda._sleep(16 * BUSY)  # longer than JAX takes to trace and to lower
    found = [y.clone() for y in results]
    results.clear()
    kl.matmul(a, b, **XLA)
    torch.cuda.synchronize()
    assert all((y == 2).all() for y in found)


class Copies(TorchDispatchMode):
    """Notes each copy that makes a tensor contiguous."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self.done = done

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            self.done.append("copy")
        return func(*args, **(kwargs or {}))


def test_every_copy_comes_before_the_first_import(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(bridge, "_import", lambda device: lambda operand: operand.__dlpack__(stream=7))
    monkeypatch.setattr(bridge, "_numpy_arrays_stay_on_cpu", lambda: False)
    order = SimpleNamespace(before=lambda stream: done.append("import"))
    x = torch.arange(6.0).view(2, 3)
    with Copies(done):
        arrays = bridge.operands((x, x.t(), None, x[:, :2]), order)
    assert done == ["copy", "copy", "import", "import", "import"]
    assert arrays[2] is None


def test_the_host_waits_before_what_jax_does_on_its_own(monkeypatch):
    """Before a compilation, and where each operand is empty. Seeds become tensors, which pass in the call's order."""
    waited: list[str] = []

    class Order:
        def __init__(self, device: torch.device) -> None:
            self.current = SimpleNamespace(synchronize=lambda: waited.append("compiles"))

        def hold(self) -> None:
            waited.append("hold")

    def program(x, traced):
        assert isinstance(traced["seed"], torch.Tensor)
        return (x + traced["seed"].sum(),)

    monkeypatch.setattr(bridge, "Order", Order)
    monkeypatch.setattr(bridge, "_called", set())
    monkeypatch.setattr(bridge, "follow_other_streams", lambda device, current: None)
    monkeypatch.setattr(bridge, "operands", lambda tensors, order: list(tensors))
    monkeypatch.setattr(bridge, "to_torch", lambda y, device, order: y)
    monkeypatch.setattr(gpu, "capturing", lambda: False)
    traced = {"seed": np.array((1, 2), np.int32)}
    for length in (2, 2, 3):
        (y,) = bridge._run_on_gpu(program, torch.device("cpu"), (torch.zeros(length),), traced)
        assert (y == 3).all()
    assert waited == ["compiles", "hold", "hold", "compiles", "hold"]


@pytest.mark.parametrize("imported", [False, True])
def test_a_call_without_imports_waits_on_the_host(monkeypatch, imported):
    waited: list[str] = []
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: waited.append("host"))
    jax_stream = SimpleNamespace(wait_event=lambda event: waited.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(bridge, "_external", lambda pointer, device: jax_stream)
    monkeypatch.setattr(bridge, "_events", bridge._Events())
    order = bridge.Order(torch.device("cuda", 0))
    if imported:
        order.before(7)
    order.hold()
    assert waited == (["stream"] if imported else ["host"])
